"""The output projection and the cross entropy of its logits in one, without ever holding all logits.

Blocks of rows are projected, and their loss and gradients computed while their logits exist. What stays is the size of
the input and of the weight.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.modules.fused_cross_entropy import Options, check_integers, check_no_group, row_loss
from fla_npu.ops.utils.second_derivatives import first_derivatives_only

BLOCK_LOGITS = 1 << 24
"""Logits of a block: 64 MiB in fp32."""
MIN_BLOCK_ROWS = 256
"""Rows of a block even so: with fewer, reading the weight once per block costs more than the products."""

BlockLoss = Callable[[torch.Tensor, slice, bool], tuple[torch.Tensor, torch.Tensor | None]]
"""Logits `[n, V]` of the rows of a slice, and whether gradients are wanted, to losses `[n]` and gradients `[n, V]`."""


class ProjectedLoss(torch.autograd.Function):
    """The sum of a loss over the rows of `x @ weight^T + bias`, with its gradients taken in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        block_loss: BlockLoss,
        num_chunks: int,
        fp32_gradients: bool,
        grad_enabled: bool,
    ) -> torch.Tensor:
        need_x, need_weight, need_bias = (need and grad_enabled for need in ctx.needs_input_grad[:3])
        dtype = torch.promote_types(weight.dtype, torch.float32) if fp32_gradients else weight.dtype
        dx = torch.empty_like(x) if need_x else None
        dweight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        dbias = torch.zeros_like(weight[:, 0], dtype=dtype) if need_bias else None
        N, V = x.shape[0], weight.shape[0]
        size = max(MIN_BLOCK_ROWS, min(-(-N // max(1, num_chunks)), BLOCK_LOGITS // V))
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for start in range(0, N, size):
            rows = slice(start, start + size)
            logits = F.linear(x[rows], weight, bias)
            losses, gradient = block_loss(logits, rows, need_x or need_weight or need_bias)
            total += losses.sum()
            if gradient is None:
                continue
            if dx is not None:
                torch.mm(gradient.to(weight.dtype), weight, out=dx[rows])
            if dweight is not None:
                dweight.addmm_(gradient.t().to(dtype), x[rows].to(dtype))
            if dbias is not None:
                dbias += gradient.sum(0)
        ctx.save_for_backward(
            dx,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None or bias is None else dbias.to(bias.dtype),
        )
        return total

    @staticmethod
    @first_derivatives_only("a fused loss, whose gradients the forward pass takes,")
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In dloss's dtype: the scale of a loss in fp16 training need not be an fp16 number.
        scaled = (None if d is None else (d.to(dloss.dtype) * dloss).to(d.dtype) for d in ctx.saved_tensors)
        return *scaled, None, None, None, None


def autocast_inputs(
    x: torch.Tensor, *others: torch.Tensor | None
) -> tuple[AbstractContextManager[Any], list[torch.Tensor | None]]:
    """What `F.linear` does to its arguments under autocast, and a context without it, for code that runs products of
    its own choice of dtypes."""
    kind = x.device.type
    tensors = [x, *others]
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensors = [None if t is None else t.to(dtype) for t in tensors]
    return torch.autocast(kind, enabled=False), tensors


def fused_linear_cross_entropy_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: Any = None,
) -> torch.Tensor:
    """Cross entropy of `x @ weight^T + bias`, differentiable in x, weight and bias.

    Args:
        x: `[N, D]`.
        target: `[N]`, integers in [0, V) or `ignore_index`.
        weight, bias: `[V, D]`, and `[V]` or None.
        ignore_index, label_smoothing, logit_scale, logit_softcapping: as in `cross_entropy_loss`.
        num_chunks: blocks hold at most this part of the rows, unless that is less than 256 rows.
        reduction: `"mean"` over the rows that count (0 if none does) or `"sum"`.
        use_l2warp, l2_penalty_factor: add the gradient of `l2_warp`.
        accumulate_grad_in_fp32: over blocks; otherwise in the weight's dtype.
        process_group: must be None, vocabularies split over processes are not supported.

    Returns:
        A scalar, fp32 (fp64 for fp64 x). Second derivatives raise a RuntimeError: `cross_entropy_loss` has them.

    Raises:
        ShapeError: shapes that do not fit together; unknown reduction.
        TypeError: `target` is not of integers.
        NotImplementedError: a `process_group` is given.
    """
    check_no_group(process_group)
    check_integers(target)
    if reduction not in ("mean", "sum"):
        raise ShapeError(f"reduction: {reduction!r} is not supported, must be 'mean' or 'sum'")
    N = x.shape[0]
    if x.ndim != 2 or target.shape != (N,) or weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ShapeError(
            "x must be [N, D], target [N] and weight [V, D], "
            f"got {tuple(x.shape)}, {tuple(target.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    options = Options(ignore_index, label_smoothing, logit_scale, 0.0, logit_softcapping)
    divisor = target.ne(ignore_index).sum().clamp(min=1) if reduction == "mean" else 1

    def block_loss(logits: torch.Tensor, rows: slice, with_gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        losses, _, gradient = row_loss(logits, target[rows], options, with_gradient)
        if gradient is not None:
            gradient /= divisor
            if use_l2warp:
                largest, place = logits.max(-1, keepdim=True)
                gradient.scatter_add_(1, place, largest.to(gradient.dtype) * (l2_penalty_factor / N))
        return losses / divisor, gradient

    context, (x_cast, weight_cast, bias_cast) = autocast_inputs(x, weight, bias)
    with context:
        return ProjectedLoss.apply(
            x_cast, weight_cast, bias_cast, block_loss, num_chunks, accumulate_grad_in_fp32, torch.is_grad_enabled()
        )


class FusedLinearCrossEntropyLoss(nn.Module):
    """`fused_linear_cross_entropy_loss` with its options as attributes."""

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        logit_softcapping: float | None = None,
        num_chunks: int = 8,
        reduction: str = "mean",
        use_l2warp: bool = False,
        l2_penalty_factor: float = 1e-4,
        accumulate_grad_in_fp32: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        check_no_group(process_group)
        if reduction not in ("mean", "sum"):
            raise ShapeError(f"reduction: {reduction!r} is not supported, must be 'mean' or 'sum'")
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.logit_softcapping = logit_softcapping
        self.num_chunks = num_chunks
        self.reduction = reduction
        self.use_l2warp = use_l2warp
        self.l2_penalty_factor = l2_penalty_factor
        self.accumulate_grad_in_fp32 = accumulate_grad_in_fp32
        self.process_group = process_group

    def forward(
        self, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x `[..., D]` and target `[...]`; see `fused_linear_cross_entropy_loss`."""
        return fused_linear_cross_entropy_loss(
            x.reshape(-1, x.shape[-1]),
            target.reshape(-1),
            weight,
            bias,
            self.ignore_index,
            self.label_smoothing,
            self.logit_scale,
            self.logit_softcapping,
            self.num_chunks,
            self.reduction,
            self.use_l2warp,
            self.l2_penalty_factor,
            self.accumulate_grad_in_fp32,
        )
