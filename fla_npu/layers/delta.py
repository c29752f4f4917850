"""What the layers of the gated delta rule share: sizes, activations and the initial values of their decays."""

import math

import torch
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.layers.linear_attention import LinearAttentionLayer
from fla_npu.layers.undecayed import UndecayedParameters


class DeltaLayer(UndecayedParameters, LinearAttentionLayer):
    """A token mixer with the gated delta rule, whose sizes follow from those of a head.

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

    undecayed = ("A_log", "dt_bias")

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
        super().__init__(
            hidden_size=hidden_size,
            num_heads=num_heads,
            mode=mode,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            layer_idx=layer_idx,
        )
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        if num_v_heads < num_heads or num_v_heads % num_heads:
            raise ValueError(f"num_v_heads={num_v_heads} must be divisible by num_heads={num_heads}")
        if not math.isclose(head_dim * expand_v, int(head_dim * expand_v), rel_tol=1e-5):
            raise ValueError(
                f"expand_v={expand_v} does not produce an integer value when multiplied by head_dim={head_dim}: "
                f"{head_dim * expand_v}"
            )
        self.allow_neg_eigval = allow_neg_eigval
        self.expand_v = expand_v
        self.head_dim = head_dim
        self.num_v_heads = num_v_heads
        self.head_k_dim = head_dim
        self.head_v_dim = int(head_dim * expand_v)
        self.key_dim = num_heads * self.head_k_dim
        self.value_dim = num_v_heads * self.head_v_dim

    def _mode(self, q_len: int) -> str:
        """With autograd on the chunk op; otherwise, and outside training, the recurrent one up to 64 tokens."""
        if self.training and not torch.is_grad_enabled():
            mode = self.mode
        else:
            mode = super()._mode(q_len)
        if self.training and mode != "chunk":
            raise ShapeError(f"Only chunk mode is supported in training, got mode=`{mode}`")
        return mode

    def _activated(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return F.silu(q), F.silu(k), F.silu(v)


def log_uniform_rates(size: int, low: float) -> torch.Tensor:
    """Initial `A_log` `[size]`, fp32: the logarithm of a uniform number in [low, 16)."""
    return torch.log(torch.empty(size, dtype=torch.float32).uniform_(low, 16))


def time_step_bias(size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Initial `dt_bias` `[size]`: the inverse softplus of time steps that are log-uniform in [1e-3, 0.1]."""
    low, high = math.log(1e-3), math.log(0.1)
    dt = torch.exp(torch.rand(size, dtype=dtype) * (high - low) + low).clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))
