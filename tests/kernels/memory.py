"""Memory that shows what a kernel reads or writes beside its tensors."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

MARGIN = 512
"""Elements around a tensor: more than a tile's row of any tested shape lies beside it."""


def filler(dtype: torch.dtype) -> float | int:
    """What memory holds that nobody has written."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def surrounded(x: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of x, of the same strides, with NaN (or the smallest integer) before, behind and in the gaps of it."""
    if x is None:
        return None
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    buffer = torch.full((extent + 2 * MARGIN,), filler(x.dtype), dtype=x.dtype)
    view = buffer.as_strided(x.shape, x.stride(), MARGIN)
    return view.copy_(x)


@contextmanager
def guarded_results() -> Iterator[None]:
    """Whatever `torch.empty` makes in here is `filler`, lies between it, and that must still be there at the end."""
    made: list[tuple[torch.Tensor, int]] = []

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
        sizes = torch.Size(shape[0] if isinstance(shape[0], tuple | torch.Size) else shape)
        buffer = torch.full((sizes.numel() + 2 * MARGIN,), filler(dtype), dtype=dtype, device=device)
        made.append((buffer, sizes.numel()))
        return buffer[MARGIN : MARGIN + sizes.numel()].view(sizes)

    def empty_like(x: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", empty_like)
        yield
    assert made, "the kernel's results were made by something other than torch.empty"
    for buffer, size in made:
        outside = torch.cat([buffer[:MARGIN], buffer[MARGIN + size :]])
        untouched = outside.isnan() if outside.is_floating_point() else outside == filler(outside.dtype)
        assert untouched.all(), "written outside of the result"
