"""What layers of linear attention share: short convolutions, padding, cache and the order of these in a forward; and
the sizes, heads, feature maps and output gates of those that came before the delta rule."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.layers.utils import (
    check_attention_mask,
    get_layer_cache,
    has_padding,
    repad_hidden_states,
    unpad_hidden_states,
    update_layer_cache,
)
from fla_npu.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
from fla_npu.modules.activations import ACT2FN

SHORT = 64
"""Up to this many tokens the recurrent op may be used, see `TokenMixer._mode`: one chunk of the chunk op."""

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Mapping[str, Activation] = {name: fn for name, fn in ACT2FN.items() if name != "bias_gelu"}
"""FLA's activations of one argument, by name."""


class TokenMixer(nn.Module, ABC):
    """A layer with a state instead of a growing cache. Padding, packed sequences and the cache are the same for all; a
    subclass implements `mix`."""

    mode: str = "chunk"
    """What runs for long inputs, see `_mode`."""
    trains_recurrently: bool = False
    """Whether short inputs go to the recurrent op with autograd on, too."""
    layer_idx: int | None

    @abstractmethod
    def mix(
        self,
        mode: str,
        hidden_states: torch.Tensor,
        last_state: dict[str, Any] | None,
        use_cache: bool,
        cu_seqlens: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Mix tokens without padding.

        Args:
            mode: names the op.
            hidden_states: `[B, T, hidden]`.
            last_state: what the cache has of earlier tokens, not to be written to unless `use_cache`.
            use_cache: return the states after these tokens.
            cu_seqlens: bounds of packed sequences, or None.
            **options: from `_position_options`.

        Returns:
            The output `[B, T, hidden]`, and the states by their names in the cache.
        """

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
            ShapeError: a mask of another shape; a mode that training does not have.
            ValueError: `past_key_values` without `layer_idx`; arguments that the op refuses.
        """
        batch_size, q_len = hidden_states.shape[:2]
        mode = self._mode(q_len)
        if attention_mask is not None:
            check_attention_mask(attention_mask, batch_size, q_len)
        last_state = get_layer_cache(self, past_key_values)
        cu_seqlens = kwargs.get("cu_seqlens")
        options = self._position_options(past_key_values, attention_mask, cu_seqlens, q_len)
        if attention_mask is not None and not has_padding(attention_mask, q_len):
            attention_mask = None
        hidden_states, indices, cu_seqlens = unpad_hidden_states(hidden_states, cu_seqlens, attention_mask, q_len)

        o, states = self.mix(mode, hidden_states, last_state, bool(use_cache), cu_seqlens, **options)
        if use_cache:
            update_layer_cache(self, past_key_values, offset=q_len, **states)
        return repad_hidden_states(o, indices, batch_size, q_len), None, past_key_values

    def _mode(self, q_len: int) -> str:
        """The op for `q_len` tokens per row: the chunk op where autograd is on, unless the layer `trains_recurrently`;
        otherwise the recurrent one up to 64 tokens, and `self.mode` above."""
        if torch.is_grad_enabled() and not self.trains_recurrently:
            return "chunk"
        return "fused_recurrent" if q_len <= SHORT else self.mode

    def _position_options(
        self, past_key_values: Any, attention_mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, q_len: int
    ) -> dict[str, Any]:
        """What `mix` has to know about positions, from the arguments of `forward`: nothing, as a rule."""
        return {}


class LinearAttentionLayer(TokenMixer):
    """A token mixer of queries, keys and values.

    A subclass sets `key_dim`, `value_dim`, `head_k_dim` and `head_v_dim`, creates the projections `q_proj`, `k_proj`,
    `v_proj`, `o_proj` and its own parameters, in the order in which checkpoints and seeds of FLA expect them, and
    implements `attend`.

    Args:
        hidden_size: of input and output.
        num_heads: H.
        mode: one of the class's `modes`; what it means, `_mode` says.
        use_short_conv: convolve q, k and v over time.
        conv_size, conv_bias: of the convolutions.
        layer_idx: of the layer's states in a cache.

    Raises:
        ShapeError: unknown mode.
    """

    modes: tuple[str, ...] = ("chunk", "fused_recurrent")

    key_dim: int
    value_dim: int
    head_k_dim: int
    head_v_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    g_proj: nn.Module
    o_proj: nn.Linear
    o_norm: FusedRMSNormGated | RMSNorm
    q_conv1d: ShortConvolution
    k_conv1d: ShortConvolution
    v_conv1d: ShortConvolution

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mode: str,
        use_short_conv: bool,
        conv_size: int,
        conv_bias: bool,
        layer_idx: int | None,
    ) -> None:
        super().__init__()
        if mode not in self.modes:
            raise ShapeError(f"Not supported mode `{mode}`, must be one of {self.modes}")
        self.mode = mode
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.use_short_conv = use_short_conv
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.layer_idx = layer_idx

    @abstractmethod
    def attend(
        self, mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The op named by `mode`: q, k and v as `[B, T, heads, channels]`, hidden_states `[B, T, hidden]` for the
        gates, options for the op; returns o, whose heads have V channels, and the final state or None."""

    def mix(
        self,
        mode: str,
        hidden_states: torch.Tensor,
        last_state: dict[str, Any] | None,
        use_cache: bool,
        cu_seqlens: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        q, k, v, conv_state = self._mixed_qkv(hidden_states, last_state, use_cache, cu_seqlens)
        o, recurrent_state = self.attend(
            mode,
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            hidden_states,
            initial_state=None if last_state is None else last_state["recurrent_state"],
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            **options,
        )
        o = self.o_proj(self.gated_norm(o, hidden_states).flatten(-2))
        return o, {"recurrent_state": recurrent_state, "conv_state": conv_state}

    def gated_norm(self, o: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm of o `[B, T, heads, V]`, and its gate of hidden_states `[B, T, hidden]` where the norm has one."""
        if isinstance(self.o_norm, FusedRMSNormGated):
            return self.o_norm(o, self.g_proj(hidden_states).unflatten(-1, (-1, self.head_v_dim)))
        return self.o_norm(o)

    def _mixed_qkv(
        self,
        hidden_states: torch.Tensor,
        last_state: dict[str, Any] | None,
        use_cache: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor | None, ...] | None]:
        """q, k and v, convolved or only activated, and the states of the convolutions to store.

        FLA's GatedDeltaNet convolves the concatenated q, k and v in one launch where there is no state. The result is
        the same bit for bit; on a CPU the concatenation would cost more than the launches, so here it is always three
        calls.
        """
        qkv = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if not self.use_short_conv:
            return *self._activated(*qkv), None
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

    def _activated(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The projections of a layer without convolutions, whose activations these would have."""
        return q, k, v

    def _qkv_dims(self) -> tuple[int, int, int]:
        """Channels of q, k and v in all heads."""
        return self.key_dim, self.key_dim, self.value_dim

    def _create_qkv_projections(self) -> None:
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(self.hidden_size, dim, bias=False) for dim in self._qkv_dims()
        )

    def _create_short_convs(self, qk_activation: str | None = "silu") -> None:
        """The convolutions, if the layer has them."""
        if self.use_short_conv:
            activations = qk_activation, qk_activation, "silu"
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (
                ShortConvolution(dim, self.conv_size, bias=self.conv_bias, activation=activation)
                for dim, activation in zip(self._qkv_dims(), activations, strict=True)
            )

    def _warn_without_short_convs(self) -> None:
        """What the constructors of layers that need convolutions say to their callers."""
        if not self.use_short_conv:
            warnings.warn(
                "use_short_conv=False: ShortConvolution is crucial to the performance, "
                "do not turn it off unless you know what you are doing",
                stacklevel=3,
            )

    def _create_output_norm(self, use_gate: bool, norm_eps: float, activation: str = "swish") -> None:
        """`o_norm`, after the projection of its gate."""
        if use_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)
            self.o_norm = FusedRMSNormGated(self.head_v_dim, eps=norm_eps, activation=activation)
        else:
            self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps, dtype=torch.float32)

    def _set_dims(self, expand_k: float, expand_v: float) -> None:
        """Sizes from the layer's width: its heads share `hidden_size * expand_k` channels of keys and
        `hidden_size * expand_v` of values.

        Raises:
            ShapeError: no whole numbers of channels.
        """
        self.expand_k, self.expand_v = expand_k, expand_v
        dims = []
        for what, expand in (("expand_k", expand_k), ("expand_v", expand_v)):
            exact = self.hidden_size * expand
            dim = round(exact)
            if not math.isclose(exact, dim):
                raise ShapeError(f"`hidden_size * {what}` must be an integer, got {exact}")
            if dim % self.num_heads:
                raise ShapeError(f"`hidden_size * {what}` = {dim} must be divisible by num_heads={self.num_heads}")
            dims.append(dim)
        self.key_dim, self.value_dim = dims
        self.head_k_dim, self.head_v_dim = (dim // self.num_heads for dim in dims)


class GroupedLayer(LinearAttentionLayer):
    """A layer whose query heads share heads of keys and values in groups, with a feature map of queries and keys and a
    gate of the output after a norm per head. A subclass calls `_create_gate_projection`, then `_create_gated_norm`.

    Args:
        hidden_size, num_heads, mode, use_short_conv, conv_size, conv_bias, layer_idx: as in the base class.
        expand_k, expand_v: channels of all keys and of all values in heads, over `hidden_size`.
        num_kv_heads: of keys and values, a divisor of `num_heads`; `num_heads` when None.
        feature_map: of queries and keys, a name in `activations`; none when None.

    Raises:
        ShapeError: sizes that do not fit together, unknown mode.
        ValueError: unknown feature map.
    """

    activations: Mapping[str, Activation] = ACTIVATIONS
    """Functions that `feature_map` and `gate_fn` may name."""

    g_norm_swish_gate: FusedRMSNormGated
    g_norm: RMSNorm

    def __init__(
        self,
        hidden_size: int,
        expand_k: float,
        expand_v: float,
        num_heads: int,
        num_kv_heads: int | None,
        mode: str,
        feature_map: str | None,
        use_short_conv: bool,
        conv_size: int,
        conv_bias: bool,
        layer_idx: int | None,
    ) -> None:
        super().__init__(
            hidden_size=hidden_size,
            num_heads=num_heads,
            mode=mode,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            layer_idx=layer_idx,
        )
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ShapeError(f"num_heads={num_heads} must be divisible by num_kv_heads={num_kv_heads}")
        self.num_kv_groups = num_heads // self.num_kv_heads
        self.feature_map_fn = None if feature_map is None else self._activation("feature_map", feature_map)
        self._set_dims(expand_k, expand_v)
        self.key_dim_per_group = self.num_kv_heads * self.head_k_dim
        self.value_dim_per_group = self.num_kv_heads * self.head_v_dim

    def gated_norm(self, o: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.use_output_gate:
            return self.g_norm(o)
        gate = self.g_proj(hidden_states).unflatten(-1, (-1, self.head_v_dim))
        return self.g_norm_swish_gate(o, gate) if self.fuse_norm_and_gate else self.g_norm(o) * self.gate_fn(gate)

    def _qkv_dims(self) -> tuple[int, int, int]:
        return self.key_dim, self.key_dim_per_group, self.value_dim_per_group

    def _create_gate_projection(self, use_output_gate: bool) -> None:
        """`g_proj`, if the output has a gate."""
        self.use_output_gate = use_output_gate
        if use_output_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)

    def _create_gated_norm(
        self, gate_fn: str, elementwise_affine: bool | None, norm_eps: float, fuse_norm: bool
    ) -> None:
        """The norm, under the name that FLA gives it with and without a gate inside.

        Raises:
            ValueError: unknown `gate_fn`.
        """
        self.gate_fn = self._activation("gate_fn", gate_fn)
        self.fuse_norm_and_gate = gate_fn == "swish" and fuse_norm and self.use_output_gate
        affine = bool(elementwise_affine)
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = FusedRMSNormGated(self.head_v_dim, affine, eps=norm_eps)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, affine, eps=norm_eps, dtype=torch.float32)

    def _activation(self, argument: str, name: str) -> Activation:
        if name not in self.activations:
            raise ValueError(f"{argument} must be one of {sorted(self.activations)}, got {name!r}")
        return self.activations[name]

    def _mapped(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys after the feature map."""
        return (q, k) if self.feature_map_fn is None else (self.feature_map_fn(q), self.feature_map_fn(k))

    def _per_query_head(self, x: torch.Tensor) -> torch.Tensor:
        """x `[B, T, num_kv_heads, ...]` with a head for each query head: `[B, T, num_heads, ...]`."""
        return x if self.num_kv_groups == 1 else x.repeat_interleave(self.num_kv_groups, dim=2)


def log_sigmoid_decay(logits: torch.Tensor, normalizer: float) -> torch.Tensor:
    """Log decays `logsigmoid(logits) / normalizer`, in fp32 (fp64 for fp64 logits): FLA rounds them to the logits'
    dtype, which a state of many tokens remembers."""
    return F.logsigmoid(logits.to(compute_dtype(logits))) / normalizer
