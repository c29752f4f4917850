"""The gate pre-pass against the formulas of `gate.py` in float64, and sums that restart at every chunk."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.compiler.build import KernelBuild
from fla_npu.ops.common import gate_kernel
from fla_npu.ops.common.configs import MILD, STRONG
from fla_npu.ops.common.gate import gate_forward
from fla_npu.ops.common.gate_kernel import FORGET, Gates, launch_gates
from fla_npu.ops.problem import Options
from tests.kernels.memory import guarded_results, surrounded

EPS = 2.0**-24
"""Half a unit in the last place of 1."""


def run(g, beta, A_log, dt_bias, options, bounds, cores=3) -> Gates:
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    inputs = (surrounded(x) for x in (g, beta, A_log, dt_bias))
    with guarded_results():
        return launch_gates(*inputs, options, surrounded(cu_seqlens), options.chunk_size, cores)


def whole(c, decay):
    """The sums `[B, HV, rows(, KP)]` in float64: those of scalar decays are in two parts."""
    return c.double() if decay == "channel" else c[0].double() + c[1].double()


def chunks(bounds, B, T, C):
    """(batch entry, first token, tokens, first row) of every chunk."""
    if bounds is None:
        return [(b, t, min(C, T - t), t) for b in range(B) for t in range(0, T, C)]
    return [
        (0, t, min(C, end - t), (bos // C + n) * C + t - bos)
        for n, (bos, end) in enumerate(pairwise(bounds))
        for t in range(bos, end, C)
    ]


def expected_decay(g, A_log, dt_bias, options):
    """float64 log decays `[B, T, HV(, K)]`."""
    x = g.double()
    if options.gate != "none":
        a = A_log.double().exp() if options.decay == "scalar" else A_log.double().exp()[:, None]
        bias = None if dt_bias is None else dt_bias.double().view(x.shape[2:])
        x = gate_forward(x, a, bias, options.gate, options.lower_bound)
    return x.clamp_min(FORGET)


@st.composite
def packs(draw, longest=50):
    lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=4))
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@given(
    data=st.data(),
    decay=st.sampled_from(("scalar", "channel")),
    gate=st.sampled_from(("none", "softplus", "bounded")),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    HV=st.sampled_from((1, 3, 8, 40)),
    C=st.sampled_from((16, 32)),
    strong=st.booleans(),
    bias=st.booleans(),
    packed=st.booleans(),
)
def test_sums_and_betas_are_those_of_the_formulas(data, decay, gate, dtype, HV, C, strong, bias, packed):
    bounds = data.draw(packs()) if packed else None
    B, T = (1, bounds[-1]) if packed else (data.draw(st.integers(1, 3)), data.draw(st.integers(0, 50)))
    K = data.draw(st.sampled_from((5, 16, 72))) if decay == "channel" and HV < 40 else 4
    tail = (K,) if decay == "channel" else ()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    logits = normal(B, T, HV, *tail) * (30 if strong else 1)
    # g is a slice of a wider projection, as layers pass it.
    wide = normal(B, T, 2 * HV, *tail)
    wide[:, :, :HV] = -logits.abs() if gate == "none" else logits
    g = wide.to(dtype)[:, :, :HV]
    beta = normal(B, T, HV).to(dtype)
    A_log, dt_bias = normal(HV), normal(HV * (K if tail else 1)) if bias else None
    lower_bound = -5.0 if gate == "bounded" else None
    options = Options(
        decay=decay, scale=1.0, gate=gate, lower_bound=lower_bound, beta_sigmoid=True, beta_scale=2.0, chunk_size=C
    )
    gated = gate != "none"
    c, betas, strong = run(g, beta, A_log if gated else None, dt_bias if gated else None, options, bounds)
    assert (strong is None) == (decay == "scalar" or gate == "bounded")
    c = whole(c, decay)

    decays = expected_decay(g, A_log, dt_bias, options)
    for b, t, length, row in chunks(bounds, B, T, C):
        assert c[b, :, row : row + C].isfinite().all()
        part = decays[b, t : t + length].movedim(0, 1)  # [HV, length(, K)]
        part = torch.cat([part, part.new_zeros(HV, C - length, *tail)], 1)
        want = part.cumsum(1)
        if strong is not None:
            windows = part.unflatten(1, (-1, STRONG // 2)).sum(2)
            marked = strong[b, :, row // C]
            # The mark may go either way where rounding decides.
            sure = (windows.amin((1, 2)) + MILD).abs() > 1e-3
            assert torch.equal(marked[sure], (windows.amin((1, 2)) < -MILD).int()[sure])
            anew = part.unflatten(1, (-1, STRONG)).cumsum(2).flatten(1, 2)
            want = torch.where(marked[:, None, None] == 1, anew, want)
        got = c[b, :, row : row + C, :K] if tail else c[b, :, row : row + C]
        # i additions, each of half a unit in the last place of a sum; and a summand is good to 8 units: exp, log,
        # sigmoid, exp(A_log) and the bias each are to one or two, and exp of a rounded argument x to x of them.
        size = want.abs() + 1e-30
        steps = torch.arange(1, C + 1).view(1, C, *(1 for _ in tail))
        argument = (
            1 + (logits.abs().max() + 3) * (A_log.exp().max() if gate == "bounded" else 1) if logits.numel() else 1
        )
        bound = 2 * EPS * (steps + 8 * argument) * size
        assert ((got - want).abs() <= bound).all()
        want = 2 * beta[b, t : t + length].double().sigmoid().mT
        assert torch.allclose(betas[b, :, row : row + length].double(), want, rtol=16 * EPS, atol=0)
        assert (betas[b, :, row + length : row + C] == 0).all()


def test_raw_betas_are_passed_on_as_they_are():
    beta = torch.randn(2, 21, 3)
    _, betas, _ = run(None, beta, None, None, Options(decay="none", scale=1.0, chunk_size=16), None)
    assert torch.equal(betas[:, :, :21], beta.mT)
    assert (betas[:, :, 21:] == 0).all()


@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_decays_that_forget_everything_can_be_subtracted(decay):
    g = torch.zeros(1, 16, 2, *((4,) if decay == "channel" else ()))
    g[:, 3], g[:, 7] = -torch.inf, -1000.0
    c, _, _ = run(g, torch.ones(1, 16, 2), None, None, Options(decay=decay, scale=1.0, chunk_size=16), None)
    c = c[..., :4] if decay == "channel" else c[0] + c[1]
    exact = torch.exp(c[:, :, 3:7] - c[:, :, 3:4])
    assert torch.equal(exact, torch.ones_like(exact))
    for t in (3, 7):
        assert (torch.exp(c[:, :, t] - c[:, :, t - 1]) == 0).all()


def test_a_nan_gate_is_not_hidden():
    g = torch.zeros(1, 16, 1)
    g[:, 5] = torch.nan
    c, _, _ = run(g, torch.ones(1, 16, 1), None, None, Options(decay="scalar", scale=1.0, chunk_size=16), None)
    c = whole(c, "scalar")
    assert c[0, 0, 5:].isnan().all() and not c[0, 0, :5].isnan().any()


def test_weak_decays_after_strong_ones_keep_their_digits():
    # After a token of -100 one float32 sum is good to 2^-18 only; its two parts keep 2^-24 of 64 * 2^-9.
    g = -1e-3 * torch.rand(1, 64, 1)
    g[:, 3] = -100.0
    c, _, _ = run(g, torch.ones(1, 64, 1), None, None, Options(decay="scalar", scale=1.0, chunk_size=64), None)
    coarse, fine = c[0, 0, 0], c[1, 0, 0]
    assert (coarse * 256 == (coarse * 256).round()).all()
    got = (coarse[4:] - coarse[3]).double() + (fine[4:] - fine[3]).double()
    want = g[0, 4:, 0].double().cumsum(0)
    assert ((got - want).abs() <= 64 * EPS * 64 * 2.0**-9).all()


def test_small_log_decays_keep_their_digits():
    # log(1 + exp(-17)) by log alone would be off by up to 2^-24 = 6e-8, more than it is.
    g = torch.full((1, 16, 1), -17.0)
    options = Options(decay="scalar", scale=1.0, gate="softplus", chunk_size=16)
    c, _, _ = run(g, torch.ones(1, 16, 1), None, None, options, None)
    c = whole(c, "scalar")
    want = -torch.nn.functional.softplus(g[0, :, 0].double()).cumsum(0)
    assert torch.allclose(c[0, 0], want, rtol=64 * EPS, atol=0)


@given(bounds=packs(longest=40), C=st.sampled_from((16, 32, 64)))
def test_slots_of_a_pack_do_not_overlap_and_fit(bounds, C):
    taken = [row for _, _, _, row in chunks(bounds, 1, bounds[-1], C)]
    assert sorted({*taken}) == taken
    assert all(row + C <= (bounds[-1] // C + len(bounds) - 1) * C for row in taken)


@pytest.mark.parametrize("cores", [1, 2, 7])
def test_every_number_of_programs_gives_the_same_bits(cores):
    g, beta = -torch.rand(1, 150, 3), torch.rand(1, 150, 3)
    options, bounds = Options(decay="scalar", scale=1.0, chunk_size=16), [0, 70, 70, 71, 150]
    results = [run(g, beta, None, None, options, bounds, cores=n) for n in (3, cores)]
    for a, b in zip(*results, strict=True):
        assert a is b is None or torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0))


def test_builds_have_every_argument_once():
    for build in gate_kernel.builds():
        assert isinstance(build, KernelBuild)
        assert [*sorted({**build.signature, **build.constants})] == sorted(gate_kernel.gates_kernel.arg_names)
