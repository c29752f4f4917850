"""What the delta-rule layers share: sizes, short convolutions, padding, cache, and the order of these in a forward."""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.layers.utils import (
    check_attention_mask,
    get_layer_cache,
    has_padding,
    repad_hidden_states,
    unpad_hidden_states,
    update_layer_cache,
)
from fla_npu.modules import ShortConvolution

MODES = ("chunk", "fused_recurrent")

SHORT = 64
"""Up to this many tokens the recurrent op is used in inference: one chunk of the chunk op."""


class DeltaLayer(nn.Module, ABC):
    """A delta-rule token mixer. A subclass creates the projections `q_proj`, `k_proj`, `v_proj`, `o_proj` and its own
    gates, in the order in which checkpoints and seeds of FLA expect them, and implements `attend` and `gated_norm`.

    Args:
        hidden_size: of input and output.
        expand_v: value head size over `head_dim`.
        head_dim: K.
        num_heads: H.
        num_v_heads: HV, a multiple of H; H when None.
        mode: op for long inputs in inference, `"chunk"` or `"fused_recurrent"`; training needs `"chunk"`.
        use_short_conv: convolve q, k and v over time; otherwise they only get the silu.
        allow_neg_eigval: double beta.
        conv_size, conv_bias: of the convolutions.
        layer_idx: of the layer's states in a cache.

    Raises:
        ValueError: sizes that do not fit together.
        ShapeError: unknown mode.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    q_conv1d: ShortConvolution
    k_conv1d: ShortConvolution
    v_conv1d: ShortConvolution

    def __init__(
        self,
        hidden_size: int,
        expand_v: float,
        head_dim: int,
        num_heads: int,
        num_v_heads: int | None,
        mode: str,
        use_short_conv: bool,
        allow_neg_eigval: bool,
        conv_size: int,
        conv_bias: bool,
        layer_idx: int | None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ShapeError(f"Not supported mode `{mode}`, must be one of {MODES}")
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        if num_v_heads < num_heads or num_v_heads % num_heads:
            raise ValueError(f"num_v_heads={num_v_heads} must be divisible by num_heads={num_heads}")
        if not math.isclose(head_dim * expand_v, int(head_dim * expand_v), rel_tol=1e-5):
            raise ValueError(
                f"expand_v={expand_v} does not produce an integer value when multiplied by head_dim={head_dim}: "
                f"{head_dim * expand_v}"
            )
        self.mode = mode
        self.allow_neg_eigval = allow_neg_eigval
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.use_short_conv = use_short_conv
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.head_k_dim = head_dim
        self.head_v_dim = int(head_dim * expand_v)
        self.key_dim = num_heads * self.head_k_dim
        self.value_dim = num_v_heads * self.head_v_dim
        self.layer_idx = layer_idx

    @abstractmethod
    def attend(
        self, mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The op named by `mode`: q, k `[B, T, H, K]`, v `[B, T, HV, V]`, hidden_states `[B, T, hidden]` for the
        gates, options for the op; returns o `[B, T, HV, V]` and the final state or None."""

    @abstractmethod
    def gated_norm(self, o: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm of o `[B, T, HV, V]` and its gate, which hidden_states `[B, T, hidden]` determine."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Any]:
        """Mix tokens.

        With autograd on the chunk op runs; otherwise the recurrent one up to 64 tokens, and `self.mode` above.

        Args:
            hidden_states: `[B, T, hidden]`.
            attention_mask: `[B, S]`, `S >= T`, 0 at padding on either side; its last T columns count. Outputs at
                padding are zero, and padding does not touch the states.
            past_key_values: a `Cache` with the states of earlier tokens, or an empty one.
            use_cache: store the states after these tokens in `past_key_values`. Otherwise the states in it stay as
                they are.
            output_attentions: ignored, there are no attention weights.
            **kwargs: `cu_seqlens` `[N + 1]`, bounds of the sequences packed in a batch of one; it takes precedence
                over the mask. Others are ignored, as in FLA.

        Returns:
            The output `[B, T, hidden]`, None, and `past_key_values`.

        Raises:
            ShapeError: a mask of another shape; training in another mode than chunk.
            ValueError: `past_key_values` without `layer_idx`; arguments that the op refuses.
        """
        batch_size, q_len = hidden_states.shape[:2]
        mode = self._mode(q_len)
        if attention_mask is not None:
            check_attention_mask(attention_mask, batch_size, q_len)
            if not has_padding(attention_mask, q_len):
                attention_mask = None
        last_state = get_layer_cache(self, past_key_values)
        hidden_states, indices, cu_seqlens = unpad_hidden_states(
            hidden_states, kwargs.get("cu_seqlens"), attention_mask, q_len
        )

        q, k, v, conv_state = self._mixed_qkv(hidden_states, last_state, bool(use_cache), cu_seqlens)
        o, recurrent_state = self.attend(
            mode,
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            hidden_states,
            initial_state=None if last_state is None else last_state["recurrent_state"],
            output_final_state=bool(use_cache),
            cu_seqlens=cu_seqlens,
        )
        if use_cache:
            update_layer_cache(
                self, past_key_values, recurrent_state=recurrent_state, conv_state=conv_state, offset=q_len
            )
        o = self.o_proj(self.gated_norm(o, hidden_states).flatten(-2))
        return repad_hidden_states(o, indices, batch_size, q_len), None, past_key_values

    def _mode(self, q_len: int) -> str:
        if torch.is_grad_enabled():
            mode = "chunk"
        elif q_len <= SHORT and not self.training:
            mode = "fused_recurrent"
        else:
            mode = self.mode
        if self.training and mode != "chunk":
            raise ShapeError(f"Only chunk mode is supported in training, got mode=`{mode}`")
        return mode

    def _mixed_qkv(
        self,
        hidden_states: torch.Tensor,
        last_state: dict[str, Any] | None,
        use_cache: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...] | None]:
        """q, k and v, convolved or only activated, and the states of the convolutions to store.

        FLA convolves the concatenated q, k and v in one launch where there is no state. The result is the same bit
        for bit; on a CPU the concatenation would cost more than the launches, so here it is always three calls.
        """
        qkv = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if not self.use_short_conv:
            q, k, v = (F.silu(x) for x in qkv)
            return q, k, v, None
        stored = None if last_state is None else last_state["conv_state"]
        states: tuple[torch.Tensor | None, ...] = stored or (None, None, None)
        read_only = states[0] is not None and not use_cache
        if read_only:
            # A decoding step writes into the state that it is given.
            states = tuple(None if s is None else s.clone() for s in states)
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        (q, q_state), (k, k_state), (v, v_state) = (
            conv(x, cache=state, output_final_state=use_cache, cu_seqlens=cu_seqlens)
            for conv, x, state in zip(convs, qkv, states, strict=True)
        )
        return q, k, v, None if read_only else (q_state, k_state, v_state)

    def _create_qkv_projections(self) -> None:
        self.q_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)

    def _create_short_convs(self) -> None:
        self.q_conv1d = ShortConvolution(self.key_dim, self.conv_size, bias=self.conv_bias)
        self.k_conv1d = ShortConvolution(self.key_dim, self.conv_size, bias=self.conv_bias)
        self.v_conv1d = ShortConvolution(self.value_dim, self.conv_size, bias=self.conv_bias)


class UndecayedParameter(nn.Parameter):
    """A parameter with the mark that FLA's training recipes look for. The class has it: transformers before version 5
    makes parameters anew from those that a module registers, and fails on attributes of their own."""

    _no_weight_decay = True


def without_weight_decay(x: torch.Tensor) -> nn.Parameter:
    """x as a parameter that weight decay leaves alone."""
    return UndecayedParameter(x)


def log_uniform_rates(size: int, low: float) -> torch.Tensor:
    """Initial `A_log` `[size]`, fp32: the logarithm of a uniform number in [low, 16)."""
    return torch.log(torch.empty(size, dtype=torch.float32).uniform_(low, 16))


def time_step_bias(size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Initial `dt_bias` `[size]`: the inverse softplus of time steps that are log-uniform in [1e-3, 0.1]."""
    low, high = math.log(1e-3), math.log(0.1)
    dt = torch.exp(torch.rand(size, dtype=dtype) * (high - low) + low).clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))
