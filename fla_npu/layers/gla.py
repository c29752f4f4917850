"""The gated linear attention layer."""

from typing import Any

import torch
import torch.nn as nn

from fla_npu.layers.linear_attention import GroupedLayer, log_sigmoid_decay
from fla_npu.ops.gla import chunk_gla, fused_chunk_gla, fused_recurrent_gla


class GatedLinearAttention(GroupedLayer):
    """Gated linear attention, https://arxiv.org/abs/2312.06635: one decay per key channel and token.

    Args:
        mode: op for more than 64 tokens, `"chunk"` or `"fused_recurrent"`. `"fused_chunk"`, which FLA has removed but
            still accepts here, fails at the first input of that length.
        hidden_size: of input and output.
        expand_k, expand_v: channels of all keys and of all values in heads, over `hidden_size`.
        num_heads: of queries.
        num_kv_heads: of keys, decays and values, a divisor of `num_heads`; `num_heads` when None.
        feature_map: of queries and keys, a name in `fla_npu.modules.activations.ACT2FN`; none when None.
        use_short_conv: convolve q, k and v over time, with a silu.
        conv_size, conv_bias: of the convolutions.
        use_output_gate: gate the normalised output.
        gate_fn: activation of that gate, a name in the same table.
        elementwise_affine: the output norm has weights.
        norm_eps: of the output norm.
        gate_logit_normalizer: log decays are `logsigmoid(...)` over this.
        gate_low_rank_dim: width between the two maps that make decays.
        clamp_min: least log decay.
        fuse_norm: norm and swish gate are one module; its parameter has another name.
        layer_idx: of the layer's states in a cache.

    Raises:
        ShapeError: sizes that do not fit together, unknown mode.
        ValueError: unknown activation.
    """

    modes = ("chunk", "fused_recurrent", "fused_chunk")
    trains_recurrently = True

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
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
        self.clamp_min = clamp_min
        self._create_qkv_projections()
        self._create_gate_projection(use_output_gate)
        self._create_short_convs()
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, self.key_dim_per_group, bias=True),
        )
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self._create_gated_norm(gate_fn, elementwise_affine, norm_eps, fuse_norm)

    def attend(
        self, mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k = self._mapped(q, k)
        g = log_sigmoid_decay(self.gk_proj(hidden_states), self.gate_logit_normalizer)
        g = g if self.clamp_min is None else g.clamp(min=self.clamp_min)
        k, v, g = (self._per_query_head(x) for x in (k, v, g.unflatten(-1, (-1, self.head_k_dim))))
        options = {"q": q, "k": k, "v": v, "state_v_first": True, **options}
        if mode == "fused_recurrent":
            return fused_recurrent_gla(gk=g, **options)
        return chunk_gla(g=g, **options) if mode == "chunk" else fused_chunk_gla(g=g, **options)
