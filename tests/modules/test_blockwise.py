"""Blocks change neither values nor gradients, whatever the function is."""

import pytest
import torch
import torch.nn.functional as F

from fla_npu.modules import blockwise


def pair_sums(a, b, scale):
    """Looks one row back, gives a and b one gradient tensor, and widens the rows."""
    s = a + b
    y = (s + F.pad(s, (0, 0, 1, 0))[:, :-1]) * scale
    return torch.cat([y, y.square()], -1)


@pytest.mark.parametrize("elements", [1, 7, 20, 60, 10_000])
@pytest.mark.parametrize("shape", [(1, 13, 3), (4, 5, 3), (5, 1, 3), (2, 0, 3)])
@pytest.mark.parametrize("frozen", [(), (0,), (1, 2)])
def test_blocks_change_nothing(elements, shape, frozen, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
    inputs = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in (shape, shape, shape[2:])]
    for i in frozen:
        inputs[i].requires_grad_(False)
    learned = [t for t in inputs if t.requires_grad]
    expected = pair_sums(*inputs)
    y = blockwise.blockwise(pair_sums, inputs[:2], inputs[2:], lookback=1)
    assert y.is_contiguous()
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    kept = dy.clone()
    for actual, want in zip(
        torch.autograd.grad(y, learned, dy), torch.autograd.grad(expected, learned, dy), strict=True
    ):
        torch.testing.assert_close(actual, want)
    assert torch.equal(dy, kept)


def test_block_boundaries_are_really_there(monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 6)
    sizes = []

    def record(x):
        sizes.append(tuple(x.shape))
        return x

    blockwise.blockwise(record, (torch.zeros(1, 5, 2),), lookback=1)
    assert sizes == [(1, 3, 2), (1, 3, 2)]
    sizes.clear()
    blockwise.blockwise(record, (torch.zeros(5, 1, 2),))
    assert sizes == [(3, 1, 2), (2, 1, 2)]


def test_dtypes():
    x = torch.randn(1, 4, 3).half()
    seen = []

    def record(x, p):
        seen.append((x.dtype, p.dtype))
        return x * p

    y = blockwise.blockwise(record, (x,), (torch.ones(3, dtype=torch.bfloat16),))
    assert seen == [(torch.float32, torch.float32)] and y.dtype == torch.float16
    assert blockwise.blockwise(record, (x,), (torch.ones(3),), dtype=torch.float64).dtype == torch.float64
