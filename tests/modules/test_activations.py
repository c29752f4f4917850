"""Activations against their formulas in fp64."""

import pytest
import torch
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.modules import activations as act
from fla_npu.modules import blockwise
from fla_npu.modules.mlp import SwiGLULinear
from fla_npu.utils import get_err_ratio


def powlu(x, power):
    positive = x.clamp(min=1e-30)
    return torch.where(x > 0, positive ** (power / (positive.sqrt() + 1)), x) * torch.sigmoid(x)


ONE = {
    "sigmoid": (act.sigmoid, lambda x: 1 / (1 + torch.exp(-x))),
    "logsigmoid": (lambda x: act.logsigmoid(x, 4.0), lambda x: -torch.log1p(torch.exp(-x)) / 4),
    "swish": (act.swish, lambda x: x / (1 + torch.exp(-x))),
    "sqrelu": (act.sqrelu, lambda x: x.clamp(min=0) ** 2),
    "elu_p1": (act.elu_p1, lambda x: F.elu(x) + 1),
    "gelu": (
        act.fast_gelu_impl,
        lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    ),
}
TWO = {
    "swiglu": (act.swiglu, lambda x, y: F.silu(x) * y),
    "sigmoidglu": (act.sigmoidglu, lambda x, y: torch.sigmoid(x) * y),
    "powglu": (lambda x, y: act.powglu(x, y, 2.5), lambda x, y: powlu(x, 2.5) * y),
}


@pytest.mark.parametrize("name", [*ONE, *TWO])
# Half a unit in the last place of the 16-bit types, a few of fp32.
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_matches_formula(name, dtype, limit):
    fn, formula = {**ONE, **TWO}[name]
    torch.manual_seed(0)
    inputs = [(3 * torch.randn(5, 7)).to(dtype) for _ in range(1 + (name in TWO))]
    y = fn(*inputs)
    assert y.dtype == dtype and y.shape == (5, 7)
    assert get_err_ratio(formula(*(x.double() for x in inputs)), y.double()) < limit


@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_gradients(name, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 4)
    fn, _ = {**ONE, **TWO}[name]
    torch.manual_seed(0)
    inputs = [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(1 + (name in TWO))]
    assert torch.autograd.gradcheck(fn, inputs)


def test_elu_p1_does_not_cancel():
    assert act.elu_p1(torch.tensor(-30.0)).item() == pytest.approx(
        torch.tensor(-30.0, dtype=torch.float64).exp().item()
    )


def test_the_rest():
    torch.manual_seed(0)
    x, y, w, b = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(act.swiglu_linear(x, y, w, b), F.linear(F.silu(x) * y, w, b))
    torch.testing.assert_close(act.sigmoidglu_linear(x, y, w, None), F.linear(torch.sigmoid(x) * y, w))
    torch.testing.assert_close(act.powglu_linear(x, y, w, b, 2.0), F.linear(act.powglu(x, y, 2.0), w, b))
    torch.testing.assert_close(SwiGLULinear()(x, y, w, b), act.swiglu_linear(x, y, w, b))
    torch.testing.assert_close(act.bias_gelu_impl(x, b[:4]), F.gelu(x + b[:4], approximate="tanh"))
    assert act.ACT2FN["silu"] is act.ACT2FN["swish"] is act.swish
    for shape in ((), (0,), (0, 3), (2, 0)):
        assert act.swish(torch.zeros(shape)).shape == shape
    with pytest.raises(ShapeError, match=r"one shape, got \(2, 3, 4\) and \(4,\)"):
        act.swiglu(x, b[:4])
