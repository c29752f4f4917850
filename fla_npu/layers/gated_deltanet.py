"""The Gated DeltaNet layer."""

from typing import Any

import torch
import torch.nn as nn

from fla_npu.layers.delta import DeltaLayer, log_uniform_rates, time_step_bias
from fla_npu.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


class GatedDeltaNet(DeltaLayer):
    """Gated Delta Networks, https://arxiv.org/abs/2412.06464: the delta rule with one decay per value head and token.

    Args:
        hidden_size: of input and output.
        expand_v: value head size over `head_dim`.
        head_dim: K.
        num_heads: H.
        num_v_heads: HV, a multiple of H; H when None.
        mode: op for long inputs in inference, `"chunk"` or `"fused_recurrent"`; training needs `"chunk"`.
        use_gate: gate the normalised output.
        use_short_conv: convolve q, k and v over time; otherwise they only get the silu.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        conv_size, conv_bias: of the convolutions.
        layer_idx: of the layer's states in a cache.
        norm_eps: of the output norm.
        output_gate_activation: `"swish"`, `"silu"` (the same) or `"sigmoid"`.
        **kwargs: ignored, as in FLA.

    Raises:
        ValueError: sizes that do not fit together, unknown `output_gate_activation`.
        ShapeError: unknown mode.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
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
        if output_gate_activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(
                f"output_gate_activation must be 'swish', 'silu', or 'sigmoid', got {output_gate_activation!r}"
            )
        self.use_gate = use_gate
        self._create_qkv_projections()
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(log_uniform_rates(self.num_v_heads, low=0))
        self.dt_bias = nn.Parameter(time_step_bias(self.num_v_heads))
        self._create_short_convs()
        self._warn_without_short_convs()
        self._create_output_norm(use_gate, norm_eps, output_gate_activation)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def attend(
        self, mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        op = chunk_gated_delta_rule if mode == "chunk" else fused_recurrent_gated_delta_rule
        return op(
            q=q,
            k=k,
            v=v,
            g=self.a_proj(hidden_states),
            beta=self.b_proj(hidden_states),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            state_v_first=True,
            **options,
        )
