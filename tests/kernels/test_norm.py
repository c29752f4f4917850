"""The norm kernels, through the functions that choose them, against the formulas in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.compiler.build import KernelBuild
from fla_npu.modules.kernels import launch, norm
from fla_npu.modules.kernels.norm import launch_norm
from fla_npu.modules.norm.l2norm import l2norm
from fla_npu.modules.norm.rms import rms
from tests.kernels.memory import guarded_results, surrounded
from tests.kernels.rounding import ROUNDING

GATES = {"swish": F.silu, "sigmoid": torch.sigmoid}


@pytest.fixture(autouse=True, scope="module")
def kernels_take_every_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "runs_kernels", lambda device: True)
        yield


def assert_close(y, want, largest):
    """About ten roundings of numbers of at most `largest`, and those of a sum of squares, which half count."""
    D = y.shape[-1]
    bound = (10 + D**0.5) * 2.0**-24 * largest + ROUNDING[y.dtype] * want.abs() + 2.0**-24
    assert ((y.double() - want).abs() <= bound).all()


@settings(max_examples=30)
@given(
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    shape=st.sampled_from(((1,), (3, 5), (130,), (0,))),
    groups=st.sampled_from((1, 3)),
    G=st.sampled_from((4, 20, 100, 700)),
    size=st.sampled_from((1e-3, 1.0, 100.0)),
    activation=st.sampled_from((None, "swish", "sigmoid")),
    gate_first=st.booleans(),
    residual=st.booleans(),
    weight=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rms_norms(dtype, shape, groups, G, size, activation, gate_first, residual, weight, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    D = groups * G

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    # Every other head of a wider projection: rows lie apart.
    x = surrounded((size * normal(*shape, 2, D))[..., 0, :].to(dtype))
    z = None if activation is None else surrounded((3 * normal(*shape, 2, D))[..., 1, :])
    r = surrounded(size * normal(*shape, D)) if residual else None
    w, b = surrounded(normal(D)) if weight else None, surrounded(normal(D)) if bias else None
    eps = 1e-5
    with guarded_results():
        y = rms(
            x,
            w,
            b,
            eps=eps,
            gate=z,
            activation=activation or "swish",
            gate_first=gate_first,
            group_size=G,
            residual=r,
        )
    s = x.double() if r is None else x.double() + r.double()
    factor = 1 if z is None else GATES[activation](z.double())
    s = s * factor if gate_first else s
    grouped = s.unflatten(-1, (groups, G))
    want = (grouped / (grouped.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    want = want if w is None else want * w.double()
    want = want if b is None else want + b.double()
    want = want if gate_first else want * factor
    assert y.shape == x.shape and y.dtype == dtype
    # |s| / rms <= sqrt(G), a weight and a gate are at most 5 and 15; a sum x + r that cancels has lost digits before.
    assert_close(y, want, G**0.5 * 5 * (1 if z is None else 15))


@given(
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    output=st.sampled_from((None, torch.float32)),
    shape=st.sampled_from(((1,), (2, 9), (0,))),
    D=st.sampled_from((3, 16, 100, 1500)),
    size=st.sampled_from((1e-4, 1.0, 100.0)),
    seed=st.integers(0, 99),
)
def test_l2_norms(dtype, output, shape, D, size, seed):
    x = (size * torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))).to(dtype)
    x[:1] = 0
    x = surrounded(x)
    with guarded_results():
        y = l2norm(x, 1e-6, output)
    want = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert y.dtype == (output or dtype)
    assert_close(y, want, 1.0)


def test_channels_that_are_not_contiguous():
    x = torch.randn(20, 6).mT
    want = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(launch_norm(x, None, None, eps=1e-6, mean=False), want, 1.0)


@pytest.mark.parametrize("cores", [1, 7])
def test_every_number_of_programs_gives_the_same_bits(cores):
    x = torch.randn(300, 40)
    a, b = (launch_norm(x, None, None, eps=1e-6, mean=True, group_size=20, cores=n) for n in (3, cores))
    assert torch.equal(a, b)


def test_builds_have_every_argument_once():
    for build in norm.builds():
        assert isinstance(build, KernelBuild)
        assert [*sorted({**build.signature, **build.constants})] == sorted(norm.norm_kernel.arg_names)
