"""LayerNorm, GroupNorm, gated layer norms and norms with a linear map, against PyTorch's norms in fp64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu import modules
from fla_npu.errors import ShapeError
from fla_npu.modules import GroupNorm, GroupNormLinear, LayerNorm, LayerNormLinear, RMSNormLinear, blockwise
from fla_npu.modules.fused_norm_gate import FusedLayerNormGated, FusedLayerNormGatedLinear, FusedRMSNormGatedLinear
from fla_npu.modules.layernorm_gated import LayerNormGated, rmsnorm_fn
from fla_npu.utils import get_err_ratio

# Of the root mean square: fp32 sums of up to 64 terms; for the 16-bit types half a unit in the last place, rounded up.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def groups(x, weight, bias, num_groups, rms, eps):
    """Per group by PyTorch's own layer and RMS norm."""
    parts = x.chunk(num_groups, -1)
    width = parts[0].shape[-1]
    norm = F.rms_norm if rms else F.layer_norm
    y = torch.cat([norm(part, (width,), eps=eps) for part in parts], -1)
    return y * (1 if weight is None else weight) + (0 if bias is None else bias)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(list(TOLERANCE)),
    num_groups=st.integers(1, 3),
    width=st.integers(2, 9),
    rms=st.booleans(),
    affine=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
    linear=st.booleans(),
    offset=st.sampled_from([0.0, 10.0]),
)
def test_group_norm_matches_fp64(seed, dtype, num_groups, width, rms, affine, bias, residual, linear, offset):
    generator = torch.Generator().manual_seed(seed)

    def rand(*size, dtype=dtype):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    D = num_groups * width
    norm = (GroupNormLinear if linear else GroupNorm)(num_groups, D, affine, bias, is_rms_norm=rms)
    for p in norm.parameters():
        p.data = rand(D, dtype=torch.float32)
    x, r, w, b = rand(2, 3, D) + offset, rand(2, 3, D) if residual else None, rand(5, D), rand(5)
    y, stream = norm(x, *((w, b) if linear else ()), residual=r, prenorm=True)
    total = x.double() + (r.double() if residual else 0)
    params = [None if p is None else p.detach().double() for p in (norm.weight, norm.bias)]
    expected = groups(total, *params, num_groups, rms, 1e-5)
    if linear:
        # The norm's result is rounded before the product, as in FLA.
        expected = F.linear(expected.to(dtype).double(), w.double(), b.double())
    assert y.dtype == dtype and stream.dtype == dtype
    assert get_err_ratio(expected, y.double()) < 2 * TOLERANCE[dtype] * (1 + offset)
    assert get_err_ratio(total, stream.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("many", [False, True], ids=["one block", "many blocks"])
def test_gradients_of_the_layer_norm(many, monkeypatch):
    if many:
        monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 20)
    torch.manual_seed(0)
    x, r, g = (torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    norm = FusedLayerNormGated(6, bias=True, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    leaves = x, r, g, norm.weight, norm.bias
    assert torch.autograd.gradcheck(lambda x, r, g, w, b: norm(x, g, residual=r), leaves)
    expected = (F.layer_norm(x + r, (6,), norm.weight, norm.bias, 1e-5) * F.silu(g)).square().sum()
    got = norm(x, g, residual=r).square().sum()
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_linear_variants_agree_with_their_parts():
    torch.manual_seed(0)
    x, g, w, b = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(4)
    for layer, norm in (
        (RMSNormLinear(8), F.rms_norm(x, (8,), eps=1e-5)),
        (LayerNormLinear(8), F.layer_norm(x, (8,), eps=1e-5)),
    ):
        torch.testing.assert_close(layer(x, w, b), F.linear(norm, w, b))
        torch.testing.assert_close(layer(x, w, None, residual=torch.zeros_like(x), prenorm=True)[1], x)
    for layer, norm in (
        (FusedRMSNormGatedLinear(8), F.rms_norm(x, (8,), eps=1e-5)),
        (FusedLayerNormGatedLinear(8), F.layer_norm(x, (8,), eps=1e-5)),
        (modules.FusedRMSNormSwishGateLinear(8), F.rms_norm(x, (8,), eps=1e-5)),
        (modules.FusedLayerNormSwishGateLinear(8), F.layer_norm(x, (8,), eps=1e-5)),
    ):
        torch.testing.assert_close(layer(x, g, w, b), F.linear(norm * F.silu(g), w, b))
    torch.testing.assert_close(modules.FusedLayerNormSwishGate(8)(x, g), F.layer_norm(x, (8,), eps=1e-5) * F.silu(g))


@pytest.mark.parametrize("before", [False, True])
def test_gated_norm_by_groups(before):
    torch.manual_seed(0)
    x, z = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    norm = LayerNormGated(8, group_size=4, norm_before_gate=before)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    gated = x if before else x * F.silu(z)
    expected = groups(gated, norm.weight, norm.bias, 2, False, 1e-5) * (F.silu(z) if before else 1)
    torch.testing.assert_close(norm(x, z), expected)
    rms = groups(gated, norm.weight, None, 2, True, 1e-6) * (F.silu(z) if before else 1)
    torch.testing.assert_close(rmsnorm_fn(x, norm.weight, None, z, group_size=4, norm_before_gate=before), rms)


def test_parameters_and_refusals():
    assert {name: tuple(p.shape) for name, p in LayerNorm(6).named_parameters()} == {"weight": (6,)}
    assert set(dict(GroupNorm(2, 6, bias=True).named_parameters())) == {"weight", "bias"}
    assert set(dict(LayerNormGated(6).named_parameters())) == {"weight", "bias"}
    assert "num_groups" not in repr(LayerNorm(6)) and "is_rms_norm=True" in repr(GroupNorm(2, 6, is_rms_norm=True))
    with pytest.raises(ValueError, match="num_groups must divide the 6 channels, got 4"):
        GroupNorm(4, 6)
    with pytest.raises(ValueError, match="hidden_size=6 must be a multiple of group_size=4"):
        LayerNormGated(6, group_size=4)
    with pytest.raises(ValueError, match="Unsupported activation: 'tanh'"):
        FusedLayerNormGated(6, activation="tanh")
    with pytest.raises(ShapeError, match="residual must have the shape of x"):
        LayerNorm(6)(torch.zeros(2, 6), residual=torch.zeros(3, 6))
