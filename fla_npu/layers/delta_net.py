"""The DeltaNet layer."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.layers.linear_attention import LinearAttentionLayer
from fla_npu.modules.activations import elu_p1
from fla_npu.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule

QK_ACTIVATIONS = ("silu", "relu", "elu", "identity")
QK_NORMS = ("l2", "sum")


class DeltaNet(LinearAttentionLayer):
    """DeltaNet, https://arxiv.org/abs/2406.06484: the delta rule without a decay.

    Args:
        mode: op for more than 64 tokens, `"chunk"` or `"fused_recurrent"`.
        d_model: another name of `hidden_size`; it wins.
        hidden_size: of input and output.
        expand_k, expand_v: channels of all keys and of all values in heads, over `hidden_size`.
        num_heads: H.
        use_beta: a beta per head and token from a projection, otherwise 1.
        use_gate: gate the normalised output.
        use_short_conv: convolve q, k and v over time; otherwise they only get their activations.
        conv_size, conv_bias: of the convolutions.
        allow_neg_eigval: double beta.
        layer_idx: of the layer's states in a cache.
        qk_activation: of queries and keys, `"silu"`, `"relu"`, `"elu"` (plus 1) or `"identity"`; values get the silu.
        qk_norm: queries and keys have length 1 (`"l2"`) or, as they should be positive, sum 1 (`"sum"`).
        norm_eps: of the output norm.
        **kwargs: ignored, as in FLA.

    Raises:
        ShapeError: sizes that do not fit together, unknown mode, activation or norm.
        NotImplementedError: mode `"fused_chunk"`, which FLA has removed.
    """

    trains_recurrently = True

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        if mode == "fused_chunk":
            raise NotImplementedError("mode `fused_chunk` does not exist any more, use `chunk`")
        hidden_size = hidden_size if d_model is None else d_model
        super().__init__(
            hidden_size=hidden_size,
            num_heads=num_heads,
            mode=mode,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            layer_idx=layer_idx,
        )
        if qk_activation not in QK_ACTIVATIONS:
            raise ShapeError(f"qk_activation must be one of {QK_ACTIVATIONS}, got {qk_activation!r}")
        if qk_norm not in QK_NORMS:
            raise ShapeError(f"qk_norm must be one of {QK_NORMS}, got {qk_norm!r}")
        self.qk_activation = qk_activation
        self.qk_norm = qk_norm
        self.use_beta = use_beta
        self.use_gate = use_gate
        self.allow_neg_eigval = allow_neg_eigval
        self._set_dims(expand_k, expand_v)
        self._create_qkv_projections()
        if use_beta:
            self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self._create_short_convs("silu" if qk_activation == "silu" else None)
        self._warn_without_short_convs()
        self._create_output_norm(use_gate, norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def attend(
        self, mode: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.qk_activation == "relu":
            q, k = F.relu(q), F.relu(k)
        elif self.qk_activation == "elu":
            q, k = elu_p1(q), elu_p1(k)
        if self.qk_norm == "sum":
            q, k = (F.normalize(x, p=1, dim=-1, eps=1e-6) for x in (q, k))
        beta = self.b_proj(hidden_states).sigmoid() if self.use_beta else torch.ones_like(q[..., 0])
        op = chunk_delta_rule if mode == "chunk" else fused_recurrent_delta_rule
        return op(
            q=q,
            k=k,
            v=v,
            beta=2 * beta if self.allow_neg_eigval else beta,
            use_qk_l2norm_in_kernel=self.qk_norm == "l2",
            **options,
        )

    def _activated(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k = (F.silu(q), F.silu(k)) if self.qk_activation == "silu" else (q, k)
        return q, k, F.silu(v)
