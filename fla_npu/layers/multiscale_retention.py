"""The retention layer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu.layers.linear_attention import Activation, GroupedLayer
from fla_npu.modules.activations import sqrelu
from fla_npu.modules.rotary import RotaryEmbedding
from fla_npu.ops.retention.decay import retention_decay
from fla_npu.ops.simple_gla import (
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)

TRANSFORMERS_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "leaky_relu": F.leaky_relu,
    "linear": nn.Identity(),
    "mish": F.mish,
    "relu": F.relu,
    "relu2": sqrelu,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""The usual activations by transformers' names, which FLA looks up for this layer, unlike for the others: here `gelu`
is not its tanh approximation."""


class MultiScaleRetention(GroupedLayer):
    """Retention, https://arxiv.org/abs/2307.08621: a constant decay per head, and rotary embeddings.

    The state in a cache is turned so that the next token is at position `past_key_values.get_seq_length(layer_idx)`;
    with an attention mask, at the number of tokens so far that are not padding. FLA's is, too, but for packed
    sequences: those it continues at the position where all of them together end.

    Args:
        mode: op for long inputs in inference, `"chunk"`, `"fused_chunk"`, `"parallel"` or `"fused_recurrent"`. The
            parallel op has no states; where one is read or stored, the chunk op takes its place (FLA loses it).
        hidden_size: of input and output.
        expand_k, expand_v: channels of all keys and of all values in heads, over `hidden_size`.
        num_heads: of queries.
        num_kv_heads: of keys and values, a divisor of `num_heads`; `num_heads` when None.
        feature_map: of queries and keys before their rotation, a name in `TRANSFORMERS_ACTIVATIONS`; none when None.
        use_short_conv: convolve q, k and v over time, with a silu.
        conv_size, conv_bias: of the convolutions.
        use_output_gate: gate the normalised output.
        gate_fn: activation of that gate, a name in the same table.
        elementwise_affine: the output norm has weights.
        norm_eps: of the output norm.
        fuse_norm: norm and swish gate are one module; its parameter has another name.
        layer_idx: of the layer's states in a cache.
        **kwargs: ignored, as in FLA.

    Raises:
        ShapeError: sizes that do not fit together, an odd key head size, unknown mode.
        ValueError: unknown activation.
    """

    modes = ("chunk", "fused_chunk", "parallel", "fused_recurrent")
    activations = TRANSFORMERS_ACTIVATIONS

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            hidden_size=hidden_size,
            expand_k=expand_k,
            expand_v=expand_v,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            mode=mode,
            feature_map=feature_map,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            layer_idx=layer_idx,
        )
        self._create_qkv_projections()
        self._create_gate_projection(use_output_gate)
        self._create_short_convs()
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self._create_gated_norm(gate_fn, elementwise_affine, norm_eps, fuse_norm)
        self.rotary = RotaryEmbedding(self.head_k_dim)
        # Heads have numbers, which give their decays. Where devices share them out, a device's do not begin at 0.
        self.first_head = 0

    def attend(
        self,
        mode: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden_states: torch.Tensor,
        first_position: int | torch.Tensor = 0,
        packed: tuple[int, int, torch.Tensor] | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cu_seqlens = options["cu_seqlens"]
        q, k = self.rotary(*self._mapped(q, k), seqlen_offset=first_position, cu_seqlens=cu_seqlens)
        k, v = self._per_query_head(k), self._per_query_head(v)
        decay = retention_decay(self.first_head + self.num_heads, q)[self.first_head :]
        if mode == "parallel" and options["initial_state"] is None and not options["output_final_state"]:
            return parallel_simple_gla(q=q, k=k, v=v, g=decay.expand(q.shape[:3]), cu_seqlens=cu_seqlens)[0], None
        op: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = chunk_simple_gla
        if mode == "fused_recurrent":
            op = fused_recurrent_simple_gla
        elif mode == "fused_chunk":
            op = fused_chunk_simple_gla
        options["g_gamma"] = decay
        if packed is None:
            return op(q=q, k=k, v=v, **options)
        seen, seen_after, lens = packed
        options["initial_state"] = self._turned(options["initial_state"], -seen)
        o, state = op(q=q, k=k, v=v, **options)
        # Two turns rather than one by their sum: the next call takes back the second to the last bit, so that the
        # rounding of large angles does not add up from call to call.
        return o, self._turned(self._turned(state, -lens), seen_after)

    def _position_options(
        self, past_key_values: Any, attention_mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, q_len: int
    ) -> dict[str, Any]:
        """The position of every sequence's first token, and of packed sequences the tokens in the cache before and
        after the call and the lengths.

        A cache counts the tokens of all packed sequences together. So that it need not know how many each of them has
        had, these start at position 0 in every call, their states are turned back from the count before it and to the
        count after it.
        """
        seen = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        if cu_seqlens is not None:
            return {"first_position": 0, "packed": (seen, seen + q_len, cu_seqlens.diff())}
        if attention_mask is None or not seen:
            return {"first_position": seen, "packed": None}
        start = attention_mask.shape[1] - q_len
        padding = attention_mask[:, max(start - seen, 0) : start] == 0
        return {"first_position": seen - padding.sum(-1), "packed": None}

    def _turned(self, state: torch.Tensor | None, by: int | torch.Tensor) -> torch.Tensor | None:
        """A state `[N, H, K, V]`, if there is one, whose tokens are `by` positions further on, an int or `[N]`."""
        if state is None:
            return None
        keys = state.transpose(-1, -2)
        by = torch.as_tensor(by, device=state.device).expand(len(state))
        return self.rotary(keys, keys[:, :, :0], position_ids=by[:, None].expand(keys.shape[:2]))[0].transpose(-1, -2)
