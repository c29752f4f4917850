"""RMSNorm with a gate before or after it, by groups, as in Mamba-2."""

import torch
import torch.nn as nn

from fla_npu.modules.norm.rms import rms


class RMSNormGated(nn.Module):
    """RMSNorm of `x * silu(z)` or, with `norm_before_gate`, of x, then times `silu(z)`.

    Args:
        hidden_size: D.
        eps: added to the mean square.
        group_size: the mean is over groups of this many channels; over all when None.
        norm_before_gate: order of norm and gate.
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
        super().__init__()
        if group_size is not None and hidden_size % group_size:
            raise ValueError(f"hidden_size={hidden_size} must be a multiple of group_size={group_size}")
        self.hidden_size = hidden_size
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """x and z `[..., D]`; x's shape and dtype."""
        return rms(
            x,
            self.weight,
            None,
            eps=self.eps,
            gate=z,
            gate_first=not self.norm_before_gate,
            group_size=self.group_size,
        )
