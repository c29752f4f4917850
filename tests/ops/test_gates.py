"""The gates against their formulas in float64, autograd, and the limits where the formulas break."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.errors import ShapeError
from fla_npu.ops.common.gate import (
    fused_beta_sigmoid,
    fused_beta_sigmoid_bwd,
    fused_beta_sigmoid_fwd,
    gate_backward,
    gate_forward,
)
from fla_npu.ops.gated_delta_rule.gate import (
    fused_gdn_gate,
    gdn_gate_bwd,
    gdn_gate_chunk_cumsum,
    gdn_gate_fwd,
    naive_gdn_gate,
)
from fla_npu.ops.kda.gate import (
    fused_kda_gate,
    kda_gate_bwd,
    kda_gate_chunk_cumsum,
    kda_gate_fwd,
    naive_kda_gate,
    naive_kda_lowerbound_gate,
)
from fla_npu.ops.utils import chunk_local_cumsum

HV, K = 3, 4


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x) in float64, without overflow and without PyTorch's version of it."""
    x = x.double()
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


def gdn_formula(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    x = g.double() if dt_bias is None else g.double() + dt_bias.double()
    return -A_log.double().exp() * softplus(x)


def kda_formula(
    g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float | None
) -> torch.Tensor:
    x = g.double() if dt_bias is None else g.double() + dt_bias.double().view(HV, K)
    a = 1.0 if A_log is None else A_log.double().exp().view(HV, 1)
    return -a * softplus(x) if lower_bound is None else lower_bound / (1 + torch.exp(-a * x))


@pytest.mark.parametrize("gate", [naive_gdn_gate, fused_gdn_gate, gdn_gate_fwd])
@pytest.mark.parametrize("bias", [False, True])
def test_gdn_gate(gate: Any, bias: bool):
    g, A_log, dt_bias = random(2, 5, HV, scale=15), random(HV), random(HV) if bias else None
    got = gate(g, A_log, dt_bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), gdn_formula(g, A_log, dt_bias), rtol=1e-6, atol=1e-8)
    assert gate(g.bfloat16(), A_log, dt_bias, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("gate", [fused_kda_gate, kda_gate_fwd])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("with_A", "lower_bound"), [(True, None), (True, -5.0), (False, -2.5)])
def test_kda_gate(gate: Any, bias: bool, with_A: bool, lower_bound: float | None):
    g, A_log, dt_bias = random(2, 5, HV, K, scale=15), random(HV), random(HV * K)
    A_log, dt_bias = A_log if with_A else None, dt_bias if bias else None
    got = gate(g, A_log, dt_bias, lower_bound=lower_bound)
    want = kda_formula(g, A_log, dt_bias, lower_bound)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-8)
    naive = (
        naive_kda_gate(g, A_log, dt_bias)
        if lower_bound is None
        else naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)
    )
    assert torch.equal(naive, got)


def test_lower_bound_of_the_naive_gate_defaults_to_minus_five():
    g = random(2, HV, K)
    assert torch.equal(naive_kda_lowerbound_gate(g), fused_kda_gate(g, lower_bound=-5.0))


def test_older_form_of_the_kda_gate():
    g, A_log, dt_bias = random(2, 5, HV, K), random(HV), random(HV * K)
    want = fused_kda_gate(g, A_log, dt_bias)
    assert torch.equal(fused_kda_gate(g.flatten(-2), A_log.view(1, 1, HV, 1), K, g_bias=dt_bias), want)
    assert torch.equal(fused_kda_gate(g, A_log, g_bias=dt_bias), want)
    with pytest.raises(ValueError, match="not both"):
        fused_kda_gate(g, A_log, dt_bias, g_bias=dt_bias)


@settings(max_examples=50, deadline=None)
@given(x=st.floats(-200, 200, width=32), a=st.floats(0, 16, width=32), bound=st.none() | st.floats(-50, -0.01))
def test_log_decay_stays_in_range(x: float, a: float, bound: float | None):
    kind = "softplus" if bound is None else "bounded"
    y = gate_forward(torch.tensor(x), torch.tensor(a), None, kind, bound)
    assert y <= 0 and y.isfinite()
    if bound is not None:
        assert y >= torch.tensor(bound)


def test_softplus_is_continuous_at_its_threshold():
    x = torch.tensor([19.999998, 20.0, 20.000002])
    y = -gate_forward(x, None, None, "softplus")
    torch.testing.assert_close(y, x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["softplus", "bounded"])
@pytest.mark.parametrize("with_A", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gate_backward_is_the_derivative(kind: str, with_A: bool, with_bias: bool):
    """Against autograd through the forward formula, with the reductions that the docstring promises."""
    lower_bound = -5.0 if kind == "bounded" else None
    x = random(2, 5, HV, K, scale=3).double().requires_grad_()
    A_log = random(HV, 1).double().requires_grad_() if with_A else None
    bias = random(HV, K).double().requires_grad_() if with_bias else None
    dy = random(2, 5, HV, K).double()
    gate_forward(x, None if A_log is None else A_log.exp(), bias, kind, lower_bound).backward(dy)
    with torch.no_grad():
        a = None if A_log is None else A_log.exp()
        dx, d_a_log = gate_backward(x, a, bias, kind, lower_bound, dy)
    torch.testing.assert_close(dx, x.grad)
    if A_log is not None:
        torch.testing.assert_close(d_a_log.sum_to_size(A_log.shape), A_log.grad)
    if bias is not None:
        torch.testing.assert_close(dx.sum_to_size(bias.shape), bias.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_the_gdn_gate(dtype: torch.dtype, bias: bool):
    """Those of the naive gate, in the shapes and dtypes of the inputs, by autograd and by the FLA-named backward."""
    dy = random(2, 5, HV)

    def leaves() -> list[torch.Tensor]:
        made = [random(2, 5, HV, scale=3).to(dtype), random(HV), *([random(HV).to(dtype)] if bias else [])]
        return [x.requires_grad_() for x in made]

    fused, naive = leaves(), leaves()
    fused_gdn_gate(*fused).backward(dy)
    naive_gdn_gate(*naive).backward(dy)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    by_name = gdn_gate_bwd(fused[0], fused[1], fused[2] if bias else None, dy)
    for x, y, z in zip(fused, naive, by_name, strict=False):
        assert x.grad.dtype == x.dtype
        torch.testing.assert_close(x.grad, y.grad, **tolerance)
        assert torch.equal(x.grad, z)
    assert bias or by_name[2] is None


@pytest.mark.parametrize(
    ("lower_bound", "A_shape"), [(None, (HV,)), (None, (1, 1, HV, 1)), (-5.0, (HV,)), (-5.0, None)]
)
def test_gradients_of_the_kda_gate(lower_bound: float | None, A_shape: tuple[int, ...] | None):
    dy = random(2, 5, HV, K)
    x, bias = random(2, 5, HV, K, scale=3).requires_grad_(), random(HV * K).requires_grad_()
    A_log = None if A_shape is None else random(HV).view(A_shape).requires_grad_()
    fused_kda_gate(x, A_log, bias, lower_bound).backward(dy)
    by_name = kda_gate_bwd(x, A_log, bias, dy, lower_bound)
    got = [x.grad, None if A_log is None else A_log.grad, bias.grad]
    leaves = [y for y in (x, A_log, bias) if y is not None]
    want = torch.autograd.grad(kda_formula(x, A_log, bias, lower_bound), leaves, dy.double())
    for y, z, w in zip([y for y in got if y is not None], [y for y in by_name if y is not None], want, strict=True):
        assert torch.equal(y, z)
        torch.testing.assert_close(y, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bounds", [None, (0, 3, 3, 21)])
def test_gates_summed_by_chunk(bounds: tuple[int, ...] | None):
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    A_log = random(HV)
    g = random(1, 21, HV)
    got = gdn_gate_chunk_cumsum(g, A_log, 16, scale=1.5, dt_bias=random(HV), cu_seqlens=cu_seqlens)
    want = chunk_local_cumsum(naive_gdn_gate(g, A_log, random(HV)), 16, scale=1.5, cu_seqlens=cu_seqlens)
    assert torch.equal(got, want)
    g = random(1, 21, HV, K)
    got = kda_gate_chunk_cumsum(g, A_log, 16, cu_seqlens=cu_seqlens, lower_bound=-5.0)
    want = chunk_local_cumsum(naive_kda_lowerbound_gate(g, A_log), 16, cu_seqlens=cu_seqlens)
    assert torch.equal(got, want)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_beta(scale: float, dtype: torch.dtype):
    x, dy = random(2, 5, HV, scale=4).to(dtype), random(2, 5, HV)
    leaf = x.clone().requires_grad_()
    y = fused_beta_sigmoid(leaf, scale)
    y.backward(dy)
    assert y.dtype == torch.float32 and leaf.grad.dtype == dtype
    torch.testing.assert_close(y, scale / (1 + torch.exp(-x.float())))
    assert torch.equal(y.detach(), fused_beta_sigmoid_fwd(x, scale))
    assert torch.equal(leaf.grad, fused_beta_sigmoid_bwd(x, dy, scale))
    wide = x.double().requires_grad_()
    (scale * wide.sigmoid()).backward(dy.double())
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-3, atol=1e-3 if dtype == torch.float16 else 1e-6)


def test_refusals():
    g = random(2, HV, K)
    for call, error, message in (
        (lambda: fused_gdn_gate(random(2, HV), random(2)), ShapeError, "A_log must have HV=3 elements"),
        (lambda: naive_gdn_gate(random(2, HV), random(HV), random(2)), ShapeError, "dt_bias must have HV=3"),
        (lambda: fused_kda_gate(g, random(HV), random(HV)), ShapeError, r"dt_bias must have HV\*K=12 elements"),
        (lambda: fused_kda_gate(g), ValueError, "`A_log` must be provided"),
        (lambda: fused_kda_gate(g, lower_bound=5.0), ValueError, "`lower_bound` must be negative, got 5.0"),
        (lambda: fused_kda_gate(random(HV), random(HV)), ShapeError, "g must have shape"),
        (lambda: kda_gate_bwd(g, random(HV)), TypeError, "dyg"),
    ):
        with pytest.raises(error, match=message):
            call()
