"""The Gated DeltaNet-2 layer."""

from typing import Any

import torch
import torch.nn as nn

from fla_npu.layers.delta import DeltaLayer, log_uniform_rates, time_step_bias
from fla_npu.modules import FusedRMSNormGated
from fla_npu.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2


class GatedDeltaNet2(DeltaLayer):
    """Gated DeltaNet-2: Kimi Delta Attention with two gates per channel for beta, one for what is erased, one for what
    is written.

    Args:
        hidden_size: of input and output.
        expand_v: value head size over `head_dim`.
        head_dim: K.
        num_heads: H. Decays and erase gates are one per query/key head.
        num_v_heads: HV, a multiple of H; H when None.
        mode: op for long inputs in inference, `"chunk"` or `"fused_recurrent"`; training needs `"chunk"`.
        use_short_conv: convolve q, k and v over time; otherwise they only get the silu.
        allow_neg_eigval: erase gates in (0, 2) instead of (0, 1).
        conv_size, conv_bias: of the convolutions.
        layer_idx: of the layer's states in a cache.
        norm_eps: of the output norm.
        **kwargs: ignored, as in FLA.

    Raises:
        ValueError: sizes that do not fit together.
        ShapeError: unknown mode.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            hidden_size=hidden_size,
            expand_v=expand_v,
            head_dim=head_dim,
            num_heads=num_heads,
            num_v_heads=num_v_heads,
            mode=mode,
            use_short_conv=use_short_conv,
            allow_neg_eigval=allow_neg_eigval,
            conv_size=conv_size,
            conv_bias=conv_bias,
            layer_idx=layer_idx,
        )
        self._create_qkv_projections()
        self._create_short_convs()
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.key_dim, bias=False),
        )
        self.b_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.w_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.A_log = nn.Parameter(log_uniform_rates(num_heads, low=1))
        self.dt_bias = nn.Parameter(time_step_bias(self.key_dim, dtype=torch.float32))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.value_dim, bias=True),
        )
        self.o_norm = FusedRMSNormGated(self.head_v_dim, activation="sigmoid", eps=norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def attend(
        self, mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        g = self.f_proj(hidden_states).unflatten(-1, (-1, self.head_k_dim))
        b = self.b_proj(hidden_states).sigmoid().unflatten(-1, (-1, self.head_k_dim))
        b = 2 * b if self.allow_neg_eigval else b
        A_log: torch.Tensor = self.A_log
        dt_bias: torch.Tensor = self.dt_bias
        group = self.num_v_heads // self.num_heads
        if group > 1:
            g, b = (x.repeat_interleave(group, dim=2) for x in (g, b))
            A_log = A_log.repeat_interleave(group)
            dt_bias = dt_bias.view(-1, self.head_k_dim).repeat_interleave(group, dim=0).flatten()
        op = chunk_gdn2 if mode == "chunk" else fused_recurrent_gdn2
        o, state, *_ = op(
            q=q,
            k=k,
            v=v,
            g=g,
            b=b,
            w=self.w_proj(hidden_states).sigmoid().unflatten(-1, (-1, self.head_v_dim)),
            A_log=A_log,
            dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            **options,
        )
        return o, state
