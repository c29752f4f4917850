"""Norms and the gated feed-forward network against fp64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.errors import ShapeError
from fla_npu.modules import FusedRMSNormGated, FusedRMSNormSwishGate, GatedMLP, L2Norm, RMSNorm, blockwise
from fla_npu.modules.l2norm import l2_norm, l2norm, l2norm_bwd, l2norm_fwd
from fla_npu.modules.layernorm import rms_norm
from fla_npu.modules.layernorm_gated import RMSNormGated

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
ACTIVATIONS = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1 << 18, 20], ids=["one block", "many blocks"])
def block_elements(request, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", request.param)


def close(actual, expected):
    limit = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit / 10)


def rms_definition(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    D=st.integers(1, 17),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    affine=st.booleans(),
    bias=st.booleans(),
    residual_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
    in_fp32=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_rms_norms_match_fp64(seed, dtype, shape, D, activation, affine, bias, residual_dtype, in_fp32, scale):
    generator = torch.Generator().manual_seed(seed)

    def rand(*size, dtype=dtype):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    x, g = rand(*shape, D) * scale, rand(*shape, D)
    residual = None if residual_dtype is None else rand(*shape, D, dtype=residual_dtype)
    if activation is None:
        norm = RMSNorm(D, affine, bias, eps=1e-5)
    else:
        norm = FusedRMSNormGated(D, affine, activation=activation)
    for p in norm.parameters():
        p.data = rand(D, dtype=torch.float32)
    with torch.no_grad():
        y, stream = norm(
            x, *([] if activation is None else [g]), residual=residual, prenorm=True, residual_in_fp32=in_fp32
        )
    total = x.double() if residual is None else x.double() + residual.double()
    expected = rms_definition(total, 1e-5)
    expected = expected if norm.weight is None else expected * norm.weight.detach().double()
    expected = expected if norm.bias is None else expected + norm.bias.detach().double()
    expected = expected if activation is None else expected * ACTIVATIONS[activation](g.double())
    assert y.dtype == dtype and y.shape == x.shape
    close(y, expected)
    if residual is not None:
        assert stream.dtype == residual.dtype
        close(stream, total)
    elif in_fp32:
        assert torch.equal(stream, x.float())
    else:
        assert stream is x


@pytest.mark.parametrize("gated", [False, True])
def test_rms_norm_gradients(gated, block_elements):
    torch.manual_seed(0)

    def rand(*size):
        return torch.randn(*size, dtype=torch.float64, requires_grad=True)

    def norm(x, g, weight, bias, residual):
        if gated:
            module = FusedRMSNormGated(6, elementwise_affine=False, activation="sigmoid")
            return module(x, g, residual=residual, prenorm=True)
        return rms_norm(x, weight, bias, residual, prenorm=True)

    x = rand(2, 3, 4, 6)
    inputs = [x, rand(*x.shape), rand(6), rand(6), rand(*x.shape)]
    used = [0, 1, 4] if gated else [0, 2, 3, 4]
    for i in set(range(5)) - set(used):
        inputs[i].requires_grad_(False)
    assert torch.autograd.gradcheck(norm, inputs)


def test_blocks_do_not_change_the_result(monkeypatch):
    torch.manual_seed(0)
    norm = FusedRMSNormGated(8)
    inputs = [torch.randn(3, 50, 8).bfloat16().requires_grad_() for _ in range(2)]
    dy = torch.randn(3, 50, 8).bfloat16()
    expected = [norm(*inputs), *torch.autograd.grad(norm(*inputs), [*inputs, norm.weight], dy)]
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 100)
    actual = [norm(*inputs), *torch.autograd.grad(norm(*inputs), [*inputs, norm.weight], dy)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_mamba_norm(group_size, norm_before_gate, gated):
    torch.manual_seed(0)
    norm = RMSNormGated(12, group_size=group_size, norm_before_gate=norm_before_gate, dtype=torch.float64)
    norm.weight.data.normal_()
    x, z = torch.randn(2, 5, 12).double(), torch.randn(2, 5, 12).double() if gated else None
    s = x if z is None or norm_before_gate else x * F.silu(z)
    expected = rms_definition(s.view(2, 5, -1, group_size or 12), 1e-5).view_as(x) * norm.weight
    if z is not None and norm_before_gate:
        expected = expected * F.silu(z)
    torch.testing.assert_close(norm(x, z), expected)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    output_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    D=st.integers(1, 17),
)
def test_l2norm_matches_fp64(seed, dtype, output_dtype, shape, D):
    x = torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    expected = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    y, rstd = l2norm_fwd(x, output_dtype=output_dtype)
    assert y.dtype == (output_dtype or dtype) and rstd.shape == x.shape[:-1]
    for result in (y, l2norm(x, output_dtype=output_dtype), L2Norm(output_dtype=output_dtype)(x)):
        assert result.shape == x.shape and result.dtype == y.dtype
        close(result, expected)
    close(rstd, 1 / (x.double().square().sum(-1) + 1e-6).sqrt())


def test_l2norm_of_zero_rows_is_zero(block_elements):
    """Padding makes such rows; the form that divides by max(norm, eps) differs on small rows."""
    x = torch.zeros(3, 8, requires_grad=True)
    y = l2norm(x)
    assert torch.equal(y, torch.zeros(3, 8))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    small = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(l2norm(small), small / (4e-6 + 1e-6) ** 0.5)


def test_l2norm_gradients(block_elements):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(l2norm, (x,))
    dy = torch.randn_like(x)
    (expected,) = torch.autograd.grad(l2norm(x), x, dy)
    y, rstd = l2norm_fwd(x.detach())
    torch.testing.assert_close(l2norm_bwd(y, rstd, dy), expected)
    assert l2_norm is l2norm


@pytest.mark.parametrize("hidden_act", ["swish", "powlu"])
@pytest.mark.parametrize("fuse_swiglu", [False, True])
def test_gated_mlp(hidden_act, fuse_swiglu, block_elements):
    torch.manual_seed(0)
    mlp = GatedMLP(6, intermediate_size=5, hidden_act=hidden_act, fuse_swiglu=fuse_swiglu).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    if hidden_act == "swish":
        act = F.silu(gate)
    else:
        act = torch.where(gate > 0, gate.abs() ** (3 / (gate.abs().sqrt() + 1)), gate) * torch.sigmoid(gate)
    torch.testing.assert_close(mlp(x, cu_seqlens=None), (act * up) @ mlp.down_proj.weight.T)
    assert torch.autograd.gradcheck(mlp, (x,))


def test_powlu_gradient_at_zero_is_finite():
    mlp = GatedMLP(4, intermediate_size=4, hidden_act="powlu")
    x = torch.zeros(1, 1, 4, requires_grad=True)
    assert torch.autograd.grad(mlp(x).sum(), x)[0].isfinite().all()


@pytest.mark.parametrize(
    ("kwargs", "inner"),
    [({}, 2816), ({"hidden_ratio": 3}, 2048), ({"intermediate_size": 7}, 7), ({"hidden_ratio": 1}, 768)],
)
def test_gated_mlp_sizes(kwargs, inner):
    mlp = GatedMLP(1024, **kwargs)
    assert [(n, tuple(p.shape)) for n, p in mlp.named_parameters()] == [
        ("gate_proj.weight", (inner, 1024)),
        ("up_proj.weight", (inner, 1024)),
        ("down_proj.weight", (1024, inner)),
    ]


def test_parameters():
    assert dict(RMSNorm(3, bias=True).named_parameters()).keys() == {"weight", "bias"}
    assert [n for n, _ in RMSNorm(3).named_parameters()] == ["weight"]
    assert RMSNorm(3).bias is None and FusedRMSNormGated(3).bias is None
    assert not list(FusedRMSNormGated(3, elementwise_affine=False).parameters())
    assert torch.equal(FusedRMSNormGated(3, dtype=torch.bfloat16).weight, torch.ones(3, dtype=torch.bfloat16))
    assert FusedRMSNormSwishGate(3).activation == "swish"
    assert repr(FusedRMSNormGated(3)) == ("FusedRMSNormGated(3, elementwise_affine=True, eps=1e-05, activation=swish)")
    assert repr(RMSNorm(3)) == "RMSNorm(3, elementwise_affine=True, eps=1e-05)"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: FusedRMSNormGated(4, activation="relu"), ValueError, r"Unsupported activation: 'relu'"),
        (
            lambda x: FusedRMSNormGated(4)(x, x[:1]),
            ShapeError,
            r"gate must have .* x, \(2, 4\), got \(1, 4\)",
        ),
        (lambda x: RMSNorm(4)(x, residual=x[:1]), ShapeError, r"residual must have the shape of x"),
        (lambda x: RMSNorm(5)(x), ShapeError, r"weight must be \[4\], got \(5,\)"),
        (lambda x: GatedMLP(4, hidden_act="gelu"), ValueError, r"Unsupported hidden_act: 'gelu'"),
        (lambda x: RMSNormGated(6, group_size=4), ValueError, r"hidden_size=6 must be a multiple of group_size=4"),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.zeros(2, 4))
