"""RMSNorm and LayerNorm with a gate before or after them, by groups, as in Mamba-2."""

import torch
import torch.nn as nn

from fla_npu.modules.norm.rms import rms


def layernorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> torch.Tensor:
    """The norm of x times `silu(z)` or, without `norm_before_gate`, the norm of `x * silu(z)`.

    Args:
        x, z: `[..., D]`; z may be None.
        weight, bias: `[D]`; bias may be None.
        group_size: the mean is over groups of this many channels; over all when None.
        is_rms_norm: do not take the mean off.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: D is not a multiple of `group_size`.
    """
    _check_group_size(x.shape[-1], group_size)
    return rms(
        x,
        weight,
        bias,
        eps=eps,
        gate=z,
        gate_first=not norm_before_gate,
        group_size=group_size,
        center=not is_rms_norm,
    )


def rmsnorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """`layernorm_fn` with the RMS norm."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm=True)


class _GatedNorm(nn.Module):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group_size: int | None,
        norm_before_gate: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        _check_group_size(hidden_size, group_size)
        self.hidden_size = hidden_size
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNormGated(_GatedNorm):
    """RMSNorm of `x * silu(z)` or, with `norm_before_gate`, of x, then times `silu(z)`.

    Args:
        hidden_size: D.
        eps: added to the mean square.
        group_size: the mean is over groups of this many channels; over all when None.
        norm_before_gate: order of norm and gate.

    Raises:
        ValueError: `hidden_size` is not a multiple of `group_size`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, False, device, dtype)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """x and z `[..., D]`; x's shape and dtype."""
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)


class LayerNormGated(_GatedNorm):
    """LayerNorm with a bias in place of the RMSNorm of `RMSNormGated`, and by default before the gate."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, True, device, dtype)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """x and z `[..., D]`; x's shape and dtype."""
        return layernorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


def _check_group_size(channels: int, group_size: int | None) -> None:
    if group_size is not None and channels % group_size:
        raise ValueError(f"hidden_size={channels} must be a multiple of group_size={group_size}")
