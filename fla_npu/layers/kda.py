"""The Kimi Delta Attention layer."""

from typing import Any

import torch
import torch.nn as nn

from fla_npu.layers.delta import DeltaLayer, log_uniform_rates, time_step_bias
from fla_npu.modules import FusedRMSNormGated
from fla_npu.ops.kda import chunk_kda, fused_recurrent_kda


class KimiDeltaAttention(DeltaLayer):
    """Kimi Delta Attention, https://arxiv.org/abs/2510.26692: the delta rule with one decay per key channel and token.

    Args:
        hidden_size: of input and output.
        expand_v: value head size over `head_dim`.
        head_dim: K.
        num_heads: H.
        num_v_heads: HV, a multiple of H; H when None.
        mode: op for long inputs in inference, `"chunk"` or `"fused_recurrent"`; training needs `"chunk"`.
        use_short_conv: convolve q, k and v over time; otherwise they only get the silu.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        safe_gate: promise the op log decays in [`lower_bound`, 0); needs a `lower_bound` in [-5, 0).
        lower_bound: log decays are `lower_bound * sigmoid(...)` instead of the unbounded softplus form.
        conv_size, conv_bias: of the convolutions.
        layer_idx: of the layer's states in a cache.
        norm_eps: of the output norm.
        **kwargs: ignored, as in FLA.

    Raises:
        ValueError: sizes that do not fit together, `safe_gate` without a fitting `lower_bound`.
        ShapeError: unknown mode.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
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
        if safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
            raise ValueError(f"safe_gate=True requires a lower_bound in [-5, 0), got {lower_bound}")
        self.safe_gate = safe_gate
        self.lower_bound = lower_bound
        self.gate_dim = self.num_v_heads * self.head_k_dim
        self._create_qkv_projections()
        self._create_short_convs()
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.gate_dim, bias=False),
        )
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        rates = torch.zeros(self.num_v_heads) if safe_gate else log_uniform_rates(self.num_v_heads, low=1)
        self.A_log = nn.Parameter(rates.float())
        self.dt_bias = nn.Parameter(time_step_bias(self.gate_dim, dtype=torch.float32))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.value_dim, bias=True),
        )
        self.o_norm = FusedRMSNormGated(self.head_v_dim, activation="sigmoid", eps=norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def attend(
        self, mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        arguments = {
            "q": q,
            "k": k,
            "v": v,
            "g": self.f_proj(hidden_states).unflatten(-1, (-1, self.head_k_dim)),
            "beta": self.b_proj(hidden_states),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "state_v_first": True,
            **options,
        }
        if mode == "chunk":
            o, state, *_ = chunk_kda(**arguments, safe_gate=self.safe_gate)
            return o, state
        return fused_recurrent_kda(**arguments)
