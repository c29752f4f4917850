"""The Gated DeltaProduct layer."""

from typing import Any

import torch
import torch.nn as nn

from fla_npu.layers.delta import DeltaLayer, log_uniform_rates, time_step_bias
from fla_npu.ops.gated_delta_product import chunk_gated_delta_product
from fla_npu.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
from fla_npu.ops.gated_delta_rule.gate import fused_gdn_gate


class GatedDeltaProduct(DeltaLayer):
    """Gated DeltaProduct, https://arxiv.org/abs/2502.10297: Gated DeltaNet with several updates of the state per token,
    each with a key, a value and a beta of its own.

    Args:
        hidden_size: of input and output.
        expand_v: value head size over `head_dim`.
        head_dim: K.
        num_heads: H.
        num_v_heads: HV, a multiple of H; H when None.
        mode: op for long inputs in inference, `"chunk"` or `"fused_recurrent"`; training needs `"chunk"`. They
            differ on NPUs only.
        use_output_gate: gate the normalised output.
        use_short_conv: convolve q, k and v over time; otherwise they only get the silu.
        conv_size, conv_bias: of the convolutions.
        layer_idx: of the layer's states in a cache.
        norm_eps: of the output norm.
        use_forget_gate: decay the state, once per token.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        num_householder: updates per token.
        **kwargs: ignored, as in FLA.

    Raises:
        ValueError: sizes that do not fit together.
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
        use_output_gate: bool = True,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        use_forget_gate: bool = True,
        allow_neg_eigval: bool = True,
        num_householder: int = 2,
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
        if num_householder < 1:
            raise ValueError(f"num_householder must be at least 1, got {num_householder}")
        self.use_output_gate = use_output_gate
        self.use_forget_gate = use_forget_gate
        self.num_householder = num_householder
        self._create_qkv_projections()
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads * num_householder, bias=False)
        if use_forget_gate:
            self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
            self.A_log = nn.Parameter(log_uniform_rates(self.num_v_heads, low=0))
            self.dt_bias = nn.Parameter(time_step_bias(self.num_v_heads))
        self._create_short_convs()
        self._warn_without_short_convs()
        self._create_output_norm(use_output_gate, norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _qkv_dims(self) -> tuple[int, int, int]:
        return self.key_dim, self.key_dim * self.num_householder, self.value_dim * self.num_householder

    def attend(
        self, mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        beta = self.b_proj(hidden_states).sigmoid()
        beta = 2 * beta if self.allow_neg_eigval else beta
        k, v, beta = (x.unflatten(2, (self.num_householder, -1)).flatten(1, 2) for x in (k, v, beta))
        g = fused_gdn_gate(self.a_proj(hidden_states), self.A_log, self.dt_bias) if self.use_forget_gate else None
        if mode == "chunk" or q.device.type != "npu":
            return chunk_gated_delta_product(
                q=q,
                k=k,
                v=v,
                g=g,
                beta=beta,
                num_householder=self.num_householder,
                use_qk_l2norm_in_kernel=True,
                **options,
            )
        return self._token_by_token(q, k, v, g, beta, **options)

    def _token_by_token(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None,
        beta: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The recurrent op, to which every update is a token: the first of them decays, the last one reads.

        On NPUs it is one launch of a kernel. The other op works on all updates of a token at once, on any device.
        """
        n = self.num_householder
        rows = q.new_zeros(*k.shape[:2], *q.shape[2:])
        rows[:, n - 1 :: n] = q
        decays = None
        if g is not None:
            decays = g.new_zeros(beta.shape)
            decays[:, ::n] = g
        o, state = fused_recurrent_gated_delta_rule(
            q=rows,
            k=k,
            v=v,
            g=decays,
            beta=beta,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens * n,
            **options,
        )
        return o[:, n - 1 :: n], state
