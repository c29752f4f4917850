"""The KL divergence between two projections, for distillation, without ever holding all logits."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.modules.fused_linear_cross_entropy import ProjectedLoss, autocast_inputs

NUM_CHUNKS = 8
"""Blocks hold at most this part of the rows; see `fused_linear_cross_entropy_loss`."""


def fused_kl_div_loss(
    x: torch.Tensor,
    target_x: torch.Tensor,
    weight: torch.Tensor,
    target_weight: torch.Tensor,
    reduction: str = "batchmean",
    accumulate_grad_in_fp32: bool = True,
) -> torch.Tensor:
    """`KL(softmax(target_x @ target_weight^T) || softmax(x @ weight^T))`, summed over classes, mean over rows.

    Args:
        x: `[N, D]`, of the student.
        target_x: `[N, D']`, of the teacher.
        weight, target_weight: `[V, D]` and `[V, D']`.
        reduction: `"batchmean"`.
        accumulate_grad_in_fp32: the weight's gradient; otherwise in its dtype.

    Returns:
        A scalar, fp32 (fp64 for fp64 x), differentiable in x and weight, once: second derivatives raise a RuntimeError.

    Raises:
        ShapeError: shapes that do not fit together; another reduction.
        RuntimeError: `target_x` or `target_weight` requires a gradient.
    """
    if reduction != "batchmean":
        raise ShapeError(f"reduction: {reduction!r} is not supported, must be 'batchmean'")
    if target_x.requires_grad or target_weight.requires_grad:
        raise RuntimeError("the teacher gets no gradients: detach target_x and target_weight")
    fits = x.ndim == target_x.ndim == weight.ndim == target_weight.ndim == 2
    if not fits or (
        (x.shape[0], weight.shape[0], x.shape[1], target_x.shape[1])
        != (target_x.shape[0], target_weight.shape[0], weight.shape[1], target_weight.shape[1])
    ):
        raise ShapeError(
            "x must be [N, D], target_x [N, D'], weight [V, D] and target_weight [V, D'], got "
            f"{tuple(x.shape)}, {tuple(target_x.shape)}, {tuple(weight.shape)} and {tuple(target_weight.shape)}"
        )
    context, (x_cast, weight_cast, teacher_x, teacher_weight) = autocast_inputs(x, weight, target_x, target_weight)
    assert teacher_x is not None and teacher_weight is not None
    N = max(1, x.shape[0])

    def block_loss(logits: torch.Tensor, rows: slice, with_gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        student = logits.to(compute_dtype(logits)).log_softmax(-1)
        teacher = F.linear(teacher_x[rows], teacher_weight).to(student.dtype).log_softmax(-1)
        shares = teacher.exp()
        losses = (shares * (teacher - student)).sum(-1) / N
        return losses, student.exp().sub_(shares).div_(N) if with_gradient else None

    with context:
        return ProjectedLoss.apply(
            x_cast, weight_cast, None, block_loss, NUM_CHUNKS, accumulate_grad_in_fp32, torch.is_grad_enabled()
        )


class FusedKLDivLoss(nn.Module):
    """`fused_kl_div_loss` with its options as attributes."""

    def __init__(self, reduction: str = "batchmean", accumulate_grad_in_fp32: bool = True) -> None:
        super().__init__()
        if reduction != "batchmean":
            raise ShapeError(f"reduction: {reduction!r} is not supported, must be 'batchmean'")
        self.reduction = reduction
        self.accumulate_grad_in_fp32 = accumulate_grad_in_fp32

    def forward(
        self, x: torch.Tensor, target_x: torch.Tensor, weight: torch.Tensor, target_weight: torch.Tensor
    ) -> torch.Tensor:
        """See `fused_kl_div_loss`."""
        return fused_kl_div_loss(x, target_x, weight, target_weight, self.reduction, self.accumulate_grad_in_fp32)
