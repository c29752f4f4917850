"""The parameters that the norm layers share."""

import torch
import torch.nn as nn


class AffineNorm(nn.Module):
    """Parameters `weight` `[hidden_size]` (ones) and, with `bias=True`, `bias` (zeros); None without.

    Subclasses define `forward`.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    num_groups = 1
    """Groups of channels, each normalised by itself."""
    is_rms_norm = False
    """Whether the mean stays."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
            if bias:
                self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}"


class AffineGroupNorm(AffineNorm):
    """The same for a norm over `num_groups` groups of channels.

    Raises:
        ValueError: `hidden_size` is not a multiple of `num_groups`.
    """

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        group_width(hidden_size, num_groups)
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.num_groups = num_groups
        self.is_rms_norm = is_rms_norm

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {super().extra_repr()}, is_rms_norm={self.is_rms_norm}"


def group_width(channels: int, num_groups: int) -> int:
    """Channels of a group.

    Raises:
        ValueError: the groups would differ.
    """
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups must divide the {channels} channels, got {num_groups}")
    return channels // num_groups
