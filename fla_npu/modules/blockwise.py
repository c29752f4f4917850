"""Row-wise functions of long inputs, computed in blocks that stay in the processor's cache.

A chain of elementwise PyTorch operations over `[B, T, D]` reads and writes main memory once per operation, and keeps
a full-size intermediate per operation for the backward pass. `blockwise` runs the chain over blocks of rows instead:
each block is read once, and the backward pass recomputes it. On a CPU a four-tap convolution becomes four times
faster that way. Accelerators have no such cache and pay for every launch, so there the input is one block.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fla_npu.dtypes import compute_dtype
from fla_npu.ops.utils.second_derivatives import gradients_with_history

BLOCK_ELEMENTS = 1 << 18
"""Elements of the first row tensor in a block: 1 MiB in fp32, about half of a core's L2 cache. Between a quarter and
twice this size the convolution's time changes by less than a fifth; much smaller blocks pay for the Python loop."""


def blockwise(
    fn: Callable[..., torch.Tensor],
    rows: Sequence[torch.Tensor | None],
    params: Sequence[torch.Tensor | None] = (),
    lookback: int = 0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`fn(*rows, *params)` by blocks of rows.

    Args:
        fn: takes row tensors `[b, t, D_i]` and the whole parameters, all in `compute_dtype`, which it must not write
            to, and returns `[b, t, D']`. Row i of the result may depend on rows `i - lookback` to i.
        rows: `[B, T, D_i]` each, any strides; the first is not None.
        params: tensors of any shape.
        lookback: rows before a block that `fn` is also given; it treats them as the start of the input, and what it
            returns for them is dropped.
        dtype: of the result, `rows[0].dtype` when None.

    Returns:
        `[B, T, D']`, contiguous, differentiable in every row tensor and parameter, twice where `fn` is. Second
        derivatives keep the intermediates of all blocks.
    """
    x = rows[0]
    assert x is not None
    wide = compute_dtype(x)
    widened = [None if p is None else p.to(wide) for p in params]
    dtype = dtype or x.dtype
    blocks = list(_blocks(x, lookback))
    plan = _Plan(fn, blocks, lookback, len(rows), wide, dtype)
    if len(blocks) == 1:
        return plan.whole(*rows, *widened).contiguous()
    return _Blockwise.apply(plan, *rows, *widened)


class _Block(NamedTuple):
    batch: slice
    start: int
    end: int


class _Plan(NamedTuple):
    fn: Callable[..., torch.Tensor]
    blocks: list[_Block]
    lookback: int
    num_rows: int
    wide: torch.dtype
    dtype: torch.dtype

    def whole(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        """All rows at once, in operations that autograd knows."""
        rows, params = tensors[: self.num_rows], tensors[self.num_rows :]
        return self.fn(*(None if r is None else r.to(self.wide) for r in rows), *params).to(self.dtype)

    def cut(self, rows: Sequence[torch.Tensor | None], block: _Block) -> list[torch.Tensor | None]:
        """The block of every row tensor and its look-back rows, in the wide dtype."""
        start = max(block.start - self.lookback, 0)
        return [None if r is None else r[block.batch, start : block.end].to(self.wide) for r in rows]


def _blocks(x: torch.Tensor, lookback: int) -> Iterator[_Block]:
    """Blocks that cover `[B, T]` in order: part of one sequence, or several whole short sequences."""
    B, T = x.shape[:2]
    if x.device.type != "cpu" or x.numel() <= BLOCK_ELEMENTS:
        yield _Block(slice(0, B), 0, T)
        return
    # At least `lookback` rows, so that a block's look-back rows lie in the block before it: the backward pass relies
    # on that.
    size = max(BLOCK_ELEMENTS * B * T // x.numel(), lookback, 1)
    if size < T:
        yield from (_Block(slice(b, b + 1), s, min(s + size, T)) for b in range(B) for s in range(0, T, size))
    else:
        yield from (_Block(slice(b, b + size // T), 0, T) for b in range(0, B, size // T))


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        rows, params = tensors[: plan.num_rows], tensors[plan.num_rows :]
        x = rows[0]
        assert x is not None
        out: torch.Tensor | None = None
        for block in plan.blocks:
            y = plan.fn(*plan.cut(rows, block), *params)[:, block.start - block.end :]
            if out is None:
                out = y.new_empty(*x.shape[:2], y.shape[2], dtype=plan.dtype)
            out[block.batch, block.start : block.end] = y
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: _Plan = ctx.plan
        tensors: tuple[torch.Tensor | None, ...] = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *gradients_with_history(plan.whole, tensors, ctx.needs_input_grad[1:], dy)
        needed = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        grads: list[torch.Tensor | None] = [None] * len(tensors)
        for i in needed:
            t = tensors[i]
            assert t is not None
            grads[i] = torch.empty_like(t) if i < plan.num_rows else torch.zeros_like(t)
        # From the last block to the first, because the gradients of a block's look-back rows belong to the block
        # before it. They are carried in the wide dtype, so every gradient is rounded once.
        carried: dict[int, torch.Tensor] = {}
        for block in reversed(plan.blocks):
            leaves = [*plan.cut(tensors[: plan.num_rows], block), *tensors[plan.num_rows :]]
            leaves = [None if t is None else t.detach().requires_grad_(i in needed) for i, t in enumerate(leaves)]
            with torch.enable_grad():
                y = plan.fn(*leaves)
                before = y.shape[1] - (block.end - block.start)
                y = y[:, before:]
            dy_block = dy[block.batch, block.start : block.end].to(y.dtype)
            wanted = [t for i, t in enumerate(leaves) if t is not None and i in needed]
            for i, d in zip(needed, torch.autograd.grad(y, wanted, dy_block), strict=True):
                grad = grads[i]
                assert grad is not None
                if i >= plan.num_rows:
                    grad += d
                    continue
                if block.end < dy.shape[1] and plan.lookback:
                    d = d.clone()  # autograd may hand out one tensor for several inputs
                    d[:, -carried[i].shape[1] :] += carried[i]
                carried[i] = d[:, :before]
                grad[block.batch, block.start : block.end] = d[:, before:]
        return (None, *grads)
