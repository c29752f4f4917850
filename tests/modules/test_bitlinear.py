"""BitNet's linear map against its definition in fp64: values, gradients straight through the rounding, parameters."""

import pytest
import torch
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.modules import BitLinear, FusedBitLinear
from fla_npu.modules.fused_bitlinear import (
    activation_quant,
    bit_linear,
    layer_norm_linear_quant,
    layer_norm_linear_quant_fn,
    rms_norm_linear_quant,
    weight_quant,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""A few units in the last place of sums of about one."""


def levels(x, scale, low, high):
    """x rounded to multiples of `1 / scale`; none of the values may be so near a tie that fp32 decides otherwise."""
    scaled = x * scale
    assert ((scaled - scaled.floor() - 0.5).abs() > 1e-4).all(), "take another seed"
    rounded = scaled.round().clamp(low, high) / scale
    return x + (rounded - x).detach()


def definition(x, weight, bias, norm_weight, norm_bias, residual, eps, rms):
    """y and `x + residual` in fp64, differentiable."""
    s = x if residual is None else x + residual
    centred = s if rms else s - s.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if norm_weight is None else y * norm_weight
    y = y if norm_bias is None else y + norm_bias
    y = levels(y, 127 / y.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5), -128, 127)
    w = levels(weight, 1 / weight.detach().abs().mean().clamp(min=1e-5), -1, 1)
    return F.linear(y, w, bias), s


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_matches_the_definition(dtype, rms, full):
    torch.manual_seed(5)
    x, residual = torch.randn(2, 3, 6).to(dtype), torch.randn(2, 3, 6).to(dtype) if full else None
    weight, bias = torch.randn(4, 6).to(dtype), torch.randn(4).to(dtype) if full else None
    norm_weight, norm_bias = (torch.randn(6).to(dtype), torch.randn(6).to(dtype)) if full else (None, None)
    arguments = [x, norm_weight, norm_bias, weight, bias, residual]
    ours = [None if t is None else t.clone().requires_grad_() for t in arguments]
    wide = [None if t is None else t.double().requires_grad_() for t in arguments]
    if rms:
        y, stream = rms_norm_linear_quant(*ours, eps=1e-5, prenorm=True, residual_in_fp32=True)
    else:
        y, stream = layer_norm_linear_quant(*ours, eps=1e-5, prenorm=True, residual_in_fp32=True)
    wide_x, wide_nw, wide_nb, wide_w, wide_b, wide_res = wide
    want, want_stream = definition(wide_x, wide_w, wide_b, wide_nw, wide_nb, wide_res, 1e-5, rms)
    limit = TOLERANCE[dtype]
    assert y.dtype == dtype and stream.dtype == (dtype if full else torch.float32)
    torch.testing.assert_close(y.double(), want, rtol=limit, atol=4 * limit)
    torch.testing.assert_close(stream.double(), want_stream, rtol=limit, atol=limit)

    dy, dstream = torch.randn_like(want), torch.randn_like(want_stream)
    torch.autograd.backward([y, stream], [dy.to(dtype), dstream.to(stream.dtype)])
    torch.autograd.backward([want, want_stream], [dy.to(dtype).double(), dstream.to(stream.dtype).double()])
    for got, expected in zip(ours, wide, strict=True):
        if got is not None:
            assert got.grad.dtype == dtype
            torch.testing.assert_close(got.grad.double(), expected.grad, rtol=4 * limit, atol=16 * limit)


def test_second_gradients():
    """Straight through the rounding, so that of the formula without it, at the rounded values."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for y in (bit_linear(x, w), definition(x, w, None, None, None, None, 1e-8, True)[0]):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), (x, w)))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_levels():
    x = torch.tensor([[3.0, -1.4, 0.01], [0.0, 0.0, 0.0], [1e-9, 0.0, -1e-9]])
    y = activation_quant(x)
    torch.testing.assert_close(y[0] * 127 / 3, torch.tensor([127.0, -59.0, 0.0]))
    assert not y[1:].any() and activation_quant(torch.zeros(2, 0)).shape == (2, 0)
    assert activation_quant(torch.tensor([127.0, 2.5, 3.5])).tolist() == [127.0, 2.0, 4.0]
    w = weight_quant(torch.tensor([[1.0, -4.0], [0.2, -0.8]]))
    torch.testing.assert_close(w, torch.tensor([[1.5, -1.5], [0.0, -1.5]]))
    assert not weight_quant(torch.zeros(2, 2)).any()


@pytest.mark.parametrize("cls", [BitLinear, FusedBitLinear])
def test_modules(cls):
    torch.manual_seed(0)
    layer = cls(6, 4, bias=True)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "weight": (4, 6),
        "bias": (4,),
        "norm.weight": (6,),
    }
    assert cls(6, 4).bias is None and layer.norm.eps == 1e-8 and layer.norm.weight.dtype == torch.float32
    x = torch.randn(2, 3, 6)
    want, _ = definition(
        *(t.double() for t in (x, layer.weight, layer.bias, layer.norm.weight)), None, None, 1e-8, True
    )
    torch.testing.assert_close(layer(x).double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer(x) - bit_linear(x, layer.weight), layer.bias.expand(2, 3, 4), rtol=0, atol=1e-6)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    layer(x.bfloat16()).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_refuses():
    x, w = torch.zeros(2, 6), torch.zeros(4, 6)
    assert layer_norm_linear_quant_fn is layer_norm_linear_quant
    with pytest.raises(ShapeError, match=r"linear_weight must be \[D', D\] with D=6, got \(4, 5\)"):
        bit_linear(x, torch.zeros(4, 5))
    with pytest.raises(ShapeError, match=r"linear_bias must be \[4\], got \(6,\)"):
        bit_linear(x, w, torch.zeros(6))
    with pytest.raises(ShapeError, match=r"weight must be \[6\]"):
        bit_linear(x, w, norm_weight=torch.zeros(4))
    with pytest.raises(ShapeError, match="residual must have the shape of x"):
        rms_norm_linear_quant(x, None, None, w, None, residual=torch.zeros(3, 6))
