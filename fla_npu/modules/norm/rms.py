"""The arithmetic that the norms share: a layer norm is the RMS norm of what is left without the mean."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.modules.blockwise import blockwise
from fla_npu.modules.kernels import launch

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


def rms(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
    gate: torch.Tensor | None = None,
    activation: str = "swish",
    gate_first: bool = False,
    group_size: int | None = None,
    residual: torch.Tensor | None = None,
    center: bool = False,
) -> torch.Tensor:
    """`s / sqrt(mean(s^2) + eps) * weight + bias`, `s = x + residual`, the result (or s, with `gate_first`) times
    `activation(gate)`.

    x, gate and residual are `[..., D]`, weight and bias `[D]`; the mean is over D or over groups of `group_size`. With
    `center` the mean of a group is taken from its elements first.
    Returns x's shape and dtype; arithmetic is done in fp32 (fp64 for fp64 x) and rounded once.
    """
    D = x.shape[-1]
    for name, t in (("gate", gate), ("residual", residual)):
        if t is not None and t.shape != x.shape:
            raise ShapeError(f"{name} must have the shape of x, {tuple(x.shape)}, got {tuple(t.shape)}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != (D,):
            raise ShapeError(f"{name} must be [{D}], got {tuple(t.shape)}")
    if not center and launch.takes(x, weight, bias, gate, residual):
        from fla_npu.modules.kernels.norm import launch_norm

        return launch_norm(
            x,
            weight,
            bias,
            eps=eps,
            mean=True,
            gate=gate,
            sigmoid=activation == "sigmoid",
            gate_first=gate_first,
            group_size=group_size,
            residual=residual,
        )

    def rms_rows(
        x: torch.Tensor,
        gate: torch.Tensor | None,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        factor = None if gate is None else GATES[activation](gate)
        if residual is not None:
            x = x + residual
        if factor is not None and gate_first:
            x = x * factor
        grouped = x.unflatten(-1, (-1, group_size or D))
        if center:
            grouped = grouped - grouped.mean(-1, keepdim=True)
        y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2)
        if weight is not None:
            y = y * weight
        if bias is not None:
            y = y + bias
        return y if factor is None or gate_first else y * factor

    rows = [None if t is None else t.reshape(1, -1, D) for t in (x, gate, residual)]
    return blockwise(rms_rows, rows, (weight, bias)).view(x.shape)


def residual_stream(x: torch.Tensor, residual: torch.Tensor | None, residual_in_fp32: bool) -> torch.Tensor:
    """What a pre-norm block carries on: `x + residual` in the residual's dtype, or x, in fp32 if asked."""
    if residual is None:
        return x.float() if residual_in_fp32 else x
    wide = compute_dtype(x)
    return (x.to(wide) + residual.to(wide)).to(residual.dtype)
