"""The gated linear attention layer with one decay per head."""

from typing import Any

import torch
import torch.nn as nn

from fla_npu.layers.linear_attention import GroupedLayer, log_sigmoid_decay
from fla_npu.modules import ShortConvolution
from fla_npu.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla


class SimpleGatedLinearAttention(GroupedLayer):
    """Gated linear attention, https://arxiv.org/abs/2312.06635, with one decay per query head and token.

    Padding is left out of the computation, where FLA zeroes keys' values and decays: states of rows padded on the
    right are exact, and outputs at padding are zero.

    Args:
        mode: op for long inputs in inference, `"chunk"` or `"fused_recurrent"`.
        hidden_size: of input and output.
        expand_k, expand_v: channels of all keys and of all values in heads, over `hidden_size`.
        num_heads: of queries and decays.
        num_kv_heads: of keys and values, a divisor of `num_heads`; `num_heads` when None.
        feature_map: of queries and keys, a name in `fla_npu.modules.activations.ACT2FN`; none when None.
        use_short_conv: convolve q, k and v over time, with a silu.
        conv_size, conv_bias: of the convolutions.
        gate_fn: activation of the output gate, a name in the same table.
        elementwise_affine: the output norm has weights.
        norm_eps: of the output norm.
        gate_logit_normalizer: log decays are `logsigmoid(...)` over this.
        fuse_norm: norm and swish gate are one module; its parameter has another name.
        layer_idx: of the layer's states in a cache.

    Raises:
        ShapeError: sizes that do not fit together, unknown mode.
        ValueError: unknown activation.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
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
        self.gate_logit_normalizer = gate_logit_normalizer
        self._create_qkv_projections()
        self._create_gate_projection(use_output_gate=True)
        self._create_short_convs()
        self.gk_proj = nn.Linear(hidden_size, num_heads)
        self._create_gated_norm(gate_fn, elementwise_affine, norm_eps, fuse_norm)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def attend(
        self, mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k = self._mapped(q, k)
        op = chunk_simple_gla if mode == "chunk" else fused_recurrent_simple_gla
        return op(
            q=q,
            k=self._per_query_head(k),
            v=self._per_query_head(v),
            g=log_sigmoid_decay(self.gk_proj(hidden_states), self.gate_logit_normalizer),
            state_v_first=True,
            **options,
        )

    def state_size(self, **kwargs: Any) -> int:
        """Numbers that the layer keeps per sequence: the state, and the inputs in the windows of the convolutions.

        Args:
            **kwargs: ignored, as in FLA.
        """
        windows = [conv.state_size for conv in self.children() if isinstance(conv, ShortConvolution)]
        return self.key_dim * self.head_v_dim + sum(windows)
