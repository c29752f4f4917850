"""The token shift against its definition, in pieces against one pass, and its gradients."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.errors import ShapeError
from fla_npu.modules import TokenShift, blockwise
from fla_npu.modules.token_shift import token_shift


def definition(x, bounds=None, cache=None):
    """y and the last tokens, token by token."""
    B, T, D = x.shape
    rows = [(b, 0, T) for b in range(B)] if bounds is None else [(0, s, e) for s, e in pairwise(bounds)]
    y, last = torch.zeros_like(x), []
    for n, (b, start, end) in enumerate(rows):
        before = torch.zeros(D, dtype=x.dtype) if cache is None else cache[n].view(D)
        for t in range(start, end):
            y[b, t] = before - x[b, t]
            before = x[b, t]
        last.append(before)
    return y, torch.stack(last)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    packed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    cached=st.sampled_from(["no", "rows", "one token"]),
    channels_first=st.booleans(),
)
def test_matches_the_definition(lens, packed, dtype, index_dtype, cached, channels_first):
    D = 5
    bounds = [sum(lens[:i]) for i in range(len(lens) + 1)] if packed else None
    B, T, N = (1, sum(lens), len(lens)) if packed else (len(lens), lens[0], len(lens))
    x = (torch.randn(B, D, T).mT if channels_first else torch.randn(B, T, D)).to(dtype)
    cache = {"no": None, "rows": torch.randn(N, D).to(dtype), "one token": torch.randn(N, 1, D).to(dtype)}[cached]
    kept = None if cache is None else cache.clone()
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=index_dtype)
    y, last = token_shift(x, cu_seqlens, cache, output_cache=True)
    # One subtraction, rounded once: the same in any precision.
    want, want_last = definition(x, bounds, cache)
    assert torch.equal(y, want) and torch.equal(last, want_last) and y.dtype == last.dtype == dtype
    assert torch.equal(token_shift(x, cu_seqlens, cache), y)
    assert cache is None or torch.equal(cache, kept)
    pair = TokenShift.apply(x, cu_seqlens, cache)
    assert torch.equal(pair[0], y) and pair[1] is None


def test_in_pieces_equals_one_pass():
    x = torch.randn(2, 9, 4)
    whole, last = token_shift(x, output_cache=True)
    cache, pieces = None, []
    for start, end in pairwise([0, 3, 3, 4, 9]):
        y, cache = token_shift(x[:, start:end], cache=cache, output_cache=True)
        pieces.append(y)
    assert torch.equal(torch.cat(pieces, 1), whole) and torch.equal(cache, last)


@pytest.mark.parametrize("elements", [1 << 18, 8], ids=["one block", "many blocks"])
@pytest.mark.parametrize("bounds", [None, (0, 2, 2, 5)])
def test_gradients(elements, bounds, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    x = torch.randn(1 if bounds else 2, 5, 2, dtype=torch.float64, requires_grad=True)
    cache = torch.randn(3 if bounds else 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, c: token_shift(x, cu_seqlens, c, True), (x, cache))


def test_refuses():
    with pytest.raises(ShapeError, match=r"x must be \[B, T, D\], got \(2, 3\)"):
        token_shift(torch.zeros(2, 3))
    with pytest.raises(ShapeError, match=r"cache must be \[N, D\] = \[2, 4\], got \[4\]"):
        token_shift(torch.zeros(2, 3, 4), cache=torch.zeros(4))
    with pytest.raises(ShapeError, match="batch size of 1"):
        token_shift(torch.zeros(2, 3, 4), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="end at T=3"):
        token_shift(torch.zeros(1, 3, 4), torch.tensor([0, 2]))
