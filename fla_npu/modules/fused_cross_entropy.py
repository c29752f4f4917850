"""Cross entropy that keeps no copy of the logits in fp32: rows go through in blocks, forward and backward."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.modules.blockwise import BLOCK_ELEMENTS
from fla_npu.ops.utils.second_derivatives import gradients_with_history

DEVICE_BLOCK_ELEMENTS = 1 << 26
"""Of logits in a block on an accelerator: 256 MiB in fp32, where launches cost more than memory."""


class Options(NamedTuple):
    """What is done to logits before, and added to, the cross entropy."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    lse_square_scale: float = 0.0
    logit_softcapping: float | None = None


def row_loss(
    logits: torch.Tensor, target: torch.Tensor, options: Options, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Loss and z-loss `[n]` of logits `[n, V]`, and the gradient of the loss in the logits; all in `compute_dtype`.

    With `z = softcap(logit_scale * logits)`, `lse = logsumexp(z)` and smoothing s, a row's loss is
    `lse - (1 - s) * z[target] - s * mean(z) + lse_square_scale * lse^2`; the last term alone is the z-loss.
    """
    V = logits.shape[1]
    z = logits.to(compute_dtype(logits)) * options.logit_scale
    slope: torch.Tensor | None = None
    if options.logit_softcapping is not None:
        bent = torch.tanh(z / options.logit_softcapping)
        slope = 1 - bent.square() if with_gradient else None
        z = bent * options.logit_softcapping
    counts = target != options.ignore_index
    picked = torch.where(counts, target, 0).long()[:, None]
    smoothing = options.label_smoothing
    lse = z.logsumexp(-1)
    z_loss = torch.zeros_like(lse)
    if options.lse_square_scale:
        z_loss = torch.where(counts, options.lse_square_scale * lse.square(), 0.0)
    loss = lse - (1 - smoothing) * z.gather(1, picked)[:, 0]
    if smoothing:
        loss = loss - smoothing * z.mean(-1)
    loss = torch.where(counts, loss, 0.0) + z_loss
    if not with_gradient:
        return loss, z_loss, None
    gradient = z.sub_(lse[:, None]).exp_()
    if options.lse_square_scale:
        gradient *= (1 + 2 * options.lse_square_scale * lse)[:, None]
    if smoothing:
        gradient -= smoothing / V
    gradient.scatter_add_(1, picked, gradient.new_full((1, 1), smoothing - 1).expand_as(picked))
    if slope is not None:
        gradient *= slope
    # A row that does not count may hold infinities: zero times those would be NaN.
    gradient.masked_fill_(~counts[:, None], 0.0)
    return loss, z_loss, gradient.mul_(options.logit_scale)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(logits, target)
        ctx.options = options
        parts = [row_loss(logits[rows], target[rows], options, False)[:2] for rows in _blocks(logits)]
        loss, z_loss = (torch.cat(x) for x in zip(*parts, strict=True))
        ctx.mark_non_differentiable(z_loss)
        return loss, z_loss

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        logits, target = ctx.saved_tensors
        if torch.is_grad_enabled():

            def loss(logits: torch.Tensor) -> torch.Tensor:
                # Infinities of a row that does not count would end as NaN.
                clean = logits.masked_fill((target == ctx.options.ignore_index)[:, None], 0.0)
                return row_loss(clean, target, ctx.options, False)[0]

            (dlogits,) = gradients_with_history(loss, [logits], [True], dloss)
            return dlogits, None, None
        gradient = torch.empty_like(logits)
        for rows in _blocks(logits):
            _, _, block = row_loss(logits[rows], target[rows], ctx.options, True)
            assert block is not None
            gradient[rows] = block.mul_(dloss[rows, None])
        return gradient, None, None


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of rows that cover `[N, V]`, at least one."""
    elements = BLOCK_ELEMENTS if logits.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    size = max(1, elements // max(1, logits.shape[1]))
    return (slice(start, start + size) for start in range(0, max(1, len(logits)), size))


def cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of every row.

    Args:
        logits: `[N, V]`.
        target: `[N]`, integers in [0, V) or `ignore_index`.
        label_smoothing: how much of the target is spread over all classes.
        logit_scale: multiplies the logits first.
        lse_square_scale: how much of the squared logsumexp is added.
        logit_softcapping: c of `c * tanh(logits / c)`, applied after the scale; none when None.
        ignore_index: rows with this target have loss 0.
        inplace_backward: accepted for FLA's sake; the logits are never overwritten.
        process_group: must be None, vocabularies split over processes are not supported.

    Returns:
        The loss `[N]`, differentiable in the logits, and of it the `lse_square_scale` term, which is not. Both are fp32
        (fp64 for fp64 logits).

    Raises:
        ShapeError: shapes that do not fit together.
        TypeError: `target` is not of integers.
        NotImplementedError: a `process_group` is given.
    """
    check_no_group(process_group)
    check_integers(target)
    if logits.ndim != 2 or target.shape != logits.shape[:1]:
        raise ShapeError(f"logits must be [N, V] and target [N], got {tuple(logits.shape)} and {tuple(target.shape)}")
    options = Options(ignore_index, label_smoothing, logit_scale, lse_square_scale, logit_softcapping)
    return _CrossEntropy.apply(logits, target, options)


class FusedCrossEntropyLoss(nn.Module):
    """`cross_entropy_loss`, reduced.

    Args:
        ignore_index, label_smoothing, logit_scale, lse_square_scale, logit_softcapping, inplace_backward,
            process_group: as there.
        reduction: `"mean"` over the rows that count (NaN if none does), `"sum"` or `"none"`.
        return_z_loss: also return the z-loss, reduced in the same way.

    Raises:
        NotImplementedError: unknown reduction, as in FLA; a `process_group` is given.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(f"Unsupported reduction: {reduction!r}, must be 'mean', 'sum' or 'none'")
        check_no_group(process_group)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.logit_softcapping = logit_softcapping
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits `[N, V]` and targets `[N]`; the loss, with `return_z_loss` and the z-loss."""
        losses = cross_entropy_loss(
            input,
            target,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.logit_softcapping,
            self.ignore_index,
        )
        if self.reduction != "none":
            total = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            losses = losses[0].sum() / total, losses[1].sum() / total
        return losses if self.return_z_loss else losses[0]


def check_integers(target: torch.Tensor) -> None:
    """TypeError unless `target` is of integers; probabilities of classes would be cut off to 0."""
    if target.dtype.is_floating_point:
        raise TypeError(f"target must hold integers, got {target.dtype}")


def check_no_group(process_group: Any) -> None:
    """NotImplementedError unless `process_group` is None."""
    if process_group is not None:
        raise NotImplementedError("vocabularies split over processes are not supported: pass process_group=None")
