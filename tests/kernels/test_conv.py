"""The convolution kernels, through the functions that choose them, against the definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.compiler.build import KernelBuild
from fla_npu.modules.causal_conv1d import causal_conv1d, causal_conv1d_update
from fla_npu.modules.kernels import conv, launch
from fla_npu.modules.kernels.conv import launch_conv, launch_update
from tests.kernels.memory import guarded_results, surrounded
from tests.kernels.rounding import ROUNDING
from tests.modules.test_causal_conv1d import definition


@pytest.fixture(autouse=True, scope="module")
def kernels_take_every_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "runs_kernels", lambda device: True)
        yield


def assert_close(y, want, largest, W):
    """Each of the W products, sums and the 8 operations around them rounds numbers of at most `largest`; then y is."""
    bound = (W + 8) * 2.0**-24 * largest + ROUNDING[y.dtype] * want.abs() + 2.0**-24
    assert ((y.double() - want).abs() <= bound).all()


@settings(max_examples=25)
@given(
    data=st.data(),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    W=st.integers(1, 8),
    D=st.sampled_from((5, 16, 130)),
    packed=st.booleans(),
    silu=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
    initial=st.booleans(),
    size=st.sampled_from((1.0, 30.0)),
    seed=st.integers(0, 99),
)
def test_convolutions(data, dtype, W, D, packed, silu, bias, residual, initial, size, seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (size * torch.randn(*shape, generator=generator)).to(dtype)

    lengths = data.draw(st.lists(st.integers(0, 45), min_size=1, max_size=4)) if packed else None
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)] if packed else None
    B, T = (1, bounds[-1]) if packed else (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 45)))
    N = len(lengths) if packed else B
    # x is a slice of a wider projection, as layers pass it.
    x = surrounded(normal(B, T, D + 3)[..., :D])
    arguments = {
        "weight": surrounded(normal(D, W)),
        "bias": surrounded(normal(D)) if bias else None,
        "residual": surrounded(normal(B, T, D)) if residual else None,
        "initial_state": surrounded(normal(N, D, W)) if initial else None,
        "activation": "silu" if silu else None,
    }
    with guarded_results():
        y, final = causal_conv1d(
            x, **arguments, output_final_state=True, cu_seqlens=None if bounds is None else torch.tensor(bounds)
        )
    want, want_final = definition(x, **arguments, cu_seqlens=bounds)
    assert_close(y, want, W * 25 * size**2, W)
    assert final.dtype == dtype
    assert torch.equal(final.double(), want_final)


@given(
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    W=st.integers(1, 8),
    D=st.sampled_from((5, 16, 300)),
    full=st.booleans(),
    gaps=st.booleans(),
    seed=st.integers(0, 99),
)
def test_updates(dtype, W, D, full, gaps, seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight = surrounded(normal(3, 1, D)), surrounded(normal(D, W))
    bias, residual = (surrounded(normal(D)), surrounded(normal(3, 1, D))) if full else (None, None)
    cache = surrounded(normal(3, 2 * D if gaps else D, W)[:, :D])
    want, want_cache = definition(x, weight, bias, residual, cache, "silu" if full else None)
    with guarded_results():
        y, updated = causal_conv1d_update(x, cache, residual, weight, bias, "silu" if full else None)
    assert_close(y, want, W * 25, W)
    assert updated is cache
    assert torch.equal(cache.double(), want_cache)
    around = cache._base
    assert torch.isnan(around).sum() == around.numel() - cache.numel()


def test_a_cache_that_is_not_contiguous_is_updated_too():
    x, weight = torch.randn(2, 6), torch.randn(6, 4)
    cache = torch.randn(2, 4, 6).mT
    want, want_cache = definition(x[:, None], weight, initial_state=cache)
    y = launch_update(x, weight, None, None, cache, None)
    assert_close(y, want[:, 0], 100, 4)
    assert torch.equal(cache.double(), want_cache)


def test_a_cache_of_another_dtype_is_rounded_as_the_portable_code_does():
    x, weight, cache = torch.randn(2, 6).half(), torch.randn(6, 4).half(), torch.randn(2, 6, 4)
    want, want_cache = definition(x[:, None], weight, initial_state=cache.half())
    y = launch_update(x, weight, None, None, cache, None)
    assert_close(y, want[:, 0], 100, 4)
    assert torch.equal(cache.double(), want_cache)


@pytest.mark.parametrize("cores", [1, 5])
def test_every_number_of_programs_gives_the_same_bits(cores):
    x, weight, bounds = torch.randn(1, 150, 140), torch.randn(140, 4), torch.tensor([0, 70, 70, 72, 150])
    for a, b in zip(
        launch_conv(x, weight, None, None, None, "silu", bounds, True),
        launch_conv(x, weight, None, None, None, "silu", bounds, True, cores=cores),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_calls_that_the_kernels_do_not_take():
    x = torch.randn(1, 3, 4)
    assert launch.takes(x)
    assert not launch.takes(x.double())
    assert not launch.takes(x, x.clone().requires_grad_())
    with torch.no_grad():
        assert launch.takes(x, x.clone().requires_grad_())


def test_builds_have_every_argument_once():
    for build in conv.builds():
        assert isinstance(build, KernelBuild)
        kernel = getattr(conv, build.kernel.split(":")[1])
        assert [*sorted({**build.signature, **build.constants})] == sorted(kernel.arg_names)
