"""Means, softmax, log-sum-exp and products of `fla.ops.utils` against their definitions."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.ops.utils import addmm, logsumexp_fwd, matmul, mean_pooling, softmax_bwd, softmax_fwd


@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 6, 11]])
@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_mean_pooling(bounds, size):
    torch.manual_seed(0)
    x = torch.randn(1 if bounds else 2, 11, 3, 2, dtype=torch.float64, requires_grad=True)
    spans = pairwise(bounds) if bounds else [(0, 11)]
    chunks = [x[:, s : min(s + size, end)].mean(1) for start, end in spans for s in range(start, end, size)]
    got = mean_pooling(x, size, None if bounds is None else torch.tensor(bounds))
    torch.testing.assert_close(got, torch.stack(chunks, 1))
    weights = torch.randn_like(got)
    wanted = torch.autograd.grad((torch.stack(chunks, 1) * weights).sum(), x)
    torch.testing.assert_close(torch.autograd.grad((got * weights).sum(), x), wanted)


def test_pooling_refuses_and_rounds_once():
    x = torch.full((1, 512, 1, 1), 1.0, dtype=torch.bfloat16)
    assert mean_pooling(x, 512).item() == 1 and mean_pooling(x, 512).dtype == torch.bfloat16
    with pytest.raises(ShapeError, match="need a batch size of 1, got 2"):
        mean_pooling(torch.zeros(2, 4, 1, 1), 2, torch.tensor([0, 4]))
    with pytest.raises(DeprecationWarning):
        mean_pooling(x, 2, head_first=False)


def test_softmax_and_logsumexp():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    p, dp = softmax_fwd(x, dtype=None), torch.randn(2, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(p, x.exp() / x.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(softmax_bwd(p, dp, dtype=None), torch.autograd.grad(p, x, dp)[0])
    assert softmax_fwd(x).dtype == softmax_bwd(p, dp).dtype == torch.float32
    torch.testing.assert_close(logsumexp_fwd(x, scale=0.5), (0.5 * x).exp().sum(-1).log())
    half = logsumexp_fwd(x.to(torch.bfloat16), dtype=torch.float16)
    assert half.dtype == torch.float16 and half.shape == (2, 3) and logsumexp_fwd(half).dtype == torch.float32


def test_products():
    torch.manual_seed(0)
    a, b, x = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(3, 5)
    for name, fn in (("", lambda y: y), ("leaky_relu", F.leaky_relu), ("relu", F.relu), ("sigmoid", torch.sigmoid)):
        torch.testing.assert_close(matmul(a, b, name), fn(torch.einsum("bmk,kn->bmn", a, b)))
    torch.testing.assert_close(matmul(a[0], b, "tanh"), torch.tanh(a[0] @ b))
    torch.testing.assert_close(addmm(x, a, b, alpha=2.0, beta=0.5), 0.5 * x + 2 * (a @ b))
    torch.testing.assert_close(addmm(x[0], a[0], b), x[0] + a[0] @ b)
    with pytest.raises(ShapeError, match=r"got \(2, 3, 4\) and \(3, 5\)"):
        matmul(a, x)
    with pytest.raises(ValueError, match=r"activation must be one of .* got 'gelu'"):
        matmul(a, b, "gelu")
