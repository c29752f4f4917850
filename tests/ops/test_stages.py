"""The decays of one chunk against the formulas at the top of `stages.py`, written out in float64, with gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.ops.common import stages
from fla_npu.ops.common.stages import (
    FORGET,
    REACH,
    LevelDecay,
    ReferencedDecay,
    ScalarDecay,
    cumulative,
    referenced_size,
)
from fla_npu.ops.common.workspace import Workspace
from fla_npu.ops.utils.constant import RCP_LN2

# float32 as in `calls.FLOAT32_NMSE`; scores cancel less than what comes out of a solve, but their exponents are rounded
# as well: an exponent of 2 * REACH = 120 has a rounding error of 4e-6 and with it its power of 2.
BOUND = 1e-11
F64 = torch.float64
NAMES = ("A", "P", "X", "written state", "from the state", "dkq", "dg", "dS")
Build = Callable[[torch.Tensor, torch.Tensor], Any]


def prepared(g: torch.Tensor) -> torch.Tensor:
    """Binary log decays as the loader hands them over."""
    return (g * RCP_LN2).clamp_min(FORGET)


def scalar(kq: torch.Tensor, g: torch.Tensor, *, delta: bool = True) -> ScalarDecay:
    return ScalarDecay(kq.flatten(1, 2), cumulative(prepared(g)), Workspace(kq, kq.dtype), delta=delta)


def referenced(kq: torch.Tensor, g: torch.Tensor, *, delta: bool = True) -> ReferencedDecay:
    return ReferencedDecay(kq, prepared(g), Workspace(kq, kq.dtype), delta=delta)


def levels(kq: torch.Tensor, g: torch.Tensor, *, delta: bool = True) -> LevelDecay:
    return LevelDecay(kq, prepared(g), Workspace(kq, kq.dtype), delta=delta)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def made(
    C: int, *, channel: bool, strength: float = 0.1, N: int = 2, R: int = 2, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """kq, g, the state `[N*R, K, V]`, u, and gradients of A, P, X and the written state."""
    K, V, M = 8, 6, N * R
    kq = torch.nn.functional.normalize(random(N, 2, C, K, seed=seed), dim=-1)
    g = -strength * random(N, R, C, K, seed=seed).abs()
    g = g if channel else g[..., 0].contiguous()
    S, dS = random(M, K, V, seed=seed), random(M, K, V, seed=seed + 1)
    dA, dP = random(M, C, C, seed=seed).tril(-1), random(M, C, C, seed=seed + 1).tril()
    return kq, g, S, random(M, C, V), dA, dP, random(M, 2, C, V), dS


def by_definition(kq, g, S, u, dA, dP, dX, dS) -> tuple[torch.Tensor, ...]:
    """Everything a decay computes for one chunk, in float64 and by autograd."""
    kq, g, S, u, dA, dP, dX, dS = (x.to(F64) for x in (kq, g, S, u, dA, dP, dX, dS))
    N, R, C = g.shape[:3]
    leaves = [x.clone().requires_grad_() for x in (kq, g, S, u)]
    kq, g, S, u = leaves
    per_channel = g if g.ndim == 4 else g[..., None].expand(N, R, C, kq.shape[-1])
    after = torch.ones(C, C, dtype=torch.bool).tril(-1)[..., None]
    # [N, R, i, j, K]: sums of g over tokens j + 1 to i, each on its own.
    pairs = torch.where(after, per_channel[:, :, :, None], 0.0).cumsum(2)
    D = torch.where(torch.ones(C, C, dtype=torch.bool).tril()[..., None], pairs.exp(), 0.0)
    k, q = kq[:, None, 0], kq[:, None, 1]
    A = torch.einsum("nric,nrijc,nrjc->nrij", k.expand(N, R, C, -1), D, k.expand(N, R, C, -1)).flatten(0, 1).tril(-1)
    P = torch.einsum("nric,nrijc,nrjc->nrij", q.expand(N, R, C, -1), D, k.expand(N, R, C, -1)).flatten(0, 1)
    reading = per_channel.cumsum(2).exp()
    X = torch.stack(((k * reading).flatten(0, 1) @ S, (q * reading).flatten(0, 1) @ S), 1)
    new = reading[:, :, -1].flatten(0, 1)[..., None] * S + (k * D[:, :, -1]).flatten(0, 1).mT @ u
    total = (A * dA).sum() + (P * dP).sum() + (X * dX).sum() + (new * dS).sum()
    dkq, dg, dS0, du = torch.autograd.grad(total, leaves)
    return A, P, X, new, du, dkq, dg, dS0


def by_class(build: Build, kq, g, S, u, dA, dP, dX, dS) -> tuple[torch.Tensor, ...]:
    decay = build(kq, g)

    def load(x: torch.Tensor) -> torch.Tensor:
        return decay.load_state(x[None], len(kq))

    def store(x: torch.Tensor) -> torch.Tensor:
        return decay.store_state(x, 1)[0]

    # Results may lie in memory that the next method works on, as may what is handed in.
    before, after = load(S), load(dS)
    A, P = (x.clone() for x in decay.attend_(before))
    X = decay.read().clone().view(dX.shape)
    du = decay.write_backward(after).clone()
    back = decay.backward_(dA.clone(), dP.clone(), dX.clone().flatten(1, 2), after, u, before)
    decay = build(kq, g)
    new = load(S)
    decay.attend_(new)
    decay.write_(new, u)
    return A.tril(-1), P, X, store(new), du, back.kq.view(kq.shape), back.g, store(back.S)


def assert_agree(
    got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], bound: float = BOUND, dg_scale: float = 0.0
) -> None:
    """Every result within its bound; that of the decay in proportion to `dg_scale`, its mean square, if it is more."""
    for name, x, y in zip(NAMES, got, want, strict=True):
        assert x.shape == y.shape and x.isfinite().all(), name
        error, power = (x - y).square().mean().item(), y.square().mean().item()
        limit = bound * power
        if name == "dg":
            # A difference of sums over pairs of tokens, of which 1 in 10 is left here.
            limit = 100 * bound * max(power, dg_scale)
        # What is below 2^-50 may count as zero.
        assert error <= limit + 2.0**-96, f"{name}: {error / power if power else error:.3g}"


def scale_of_dg(tensors: tuple[torch.Tensor, ...]) -> float:
    """Mean square of the gradient of a weak decay: that of a strong one vanishes, the terms it is made of do not."""
    kq, g, *rest = tensors
    return by_definition(kq, g.clamp_min(-0.01), *rest)[NAMES.index("dg")].square().mean().item()


KINDS = {"scalar": scalar, "referenced": referenced, "levels": levels}


@pytest.mark.parametrize("kind", KINDS)
@given(
    C=st.integers(1, 64), R=st.sampled_from([1, 3]), seed=st.integers(0, 9), strength=st.sampled_from([0.0, 0.1, 0.5])
)
def test_definition(kind: str, C: int, R: int, seed: int, strength: float):
    """At strength 0.5 sums of 32 binary log decays reach 30 to 40, within what a referenced decay may be given."""
    tensors = made(C, channel=kind != "scalar", R=R, seed=seed, strength=strength)
    assert_agree(by_class(KINDS[kind], *tensors), by_definition(*tensors))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("C", [1, 33, 64])
@pytest.mark.parametrize("R", [1, 3])
def test_without_the_delta_rule(kind: str, C: int, R: int):
    """What is left are the rows of q: the other results are those of a delta rule to which A and what k reads do not
    matter."""
    tensors = made(C, channel=kind != "scalar", R=R, seed=5)
    kq, g, S, u, dA, dP, dX, dS = tensors
    dX = torch.stack((torch.zeros_like(dX[:, 0]), dX[:, 1]), dim=1)
    want = by_class(KINDS[kind], kq, g, S, u, torch.zeros_like(dA), dP, dX, dS)
    decay = KINDS[kind](kq, g, delta=False)
    before, after = (decay.load_state(x[None], len(kq)) for x in (S, dS))
    A, P = decay.attend_(before)
    P, X = P.clone(), decay.read().clone()
    du = decay.write_backward(after).clone()
    back = decay.backward_(None, dP.clone(), dX[:, 1].clone(), after, u, before)
    assert A is None
    got = (P, X, du, back.kq.view(kq.shape), back.g, decay.store_state(back.S, 1)[0])
    for x, y in zip(got, (want[1], want[2][:, 1], *want[4:]), strict=True):
        assert x.shape == y.shape and (x - y).square().sum() <= BOUND * y.square().sum()


@pytest.mark.parametrize("kind", ["scalar", "levels"])
@pytest.mark.parametrize("C", [5, 64])
@pytest.mark.parametrize("strength", [5.0, 100.0])
def test_definition_under_strong_decay(kind: str, C: int, strength: float):
    """100 per token is a sum of -6400 in a chunk; the exponential of its negative does not exist in any precision."""
    tensors = made(C, channel=kind != "scalar", strength=strength)
    dg_scale = scale_of_dg(tensors) if kind == "scalar" else 0.0
    assert_agree(by_class(KINDS[kind], *tensors), by_definition(*tensors), dg_scale=dg_scale)


@pytest.mark.parametrize("kind", ["scalar", "levels"])
@pytest.mark.parametrize("where", [0, 20, 31, 32, 49])
def test_one_infinite_decay(kind: str, where: int):
    tensors = made(50, channel=kind != "scalar")
    g = tensors[1]
    g[:, :, where] = float("-inf")
    got = by_class(KINDS[kind], *tensors)
    # In the definition exp(-inf) * 0 has no derivative: -1000 forgets as thoroughly, and has.
    want = by_definition(tensors[0], g.clamp_min(-1000), *tensors[2:])
    assert_agree(got, want, dg_scale=scale_of_dg(tensors))


@pytest.mark.parametrize("kind", ["scalar", "levels"])
def test_a_strong_decay_costs_later_tokens_no_digits(kind: str):
    """A difference of two cumulative sums near -1000 would leave 5 of 7 digits to the decays after it."""
    tensors = made(64, channel=kind != "scalar")
    tensors[1][:, :, 2] = -1000.0
    assert_agree(by_class(KINDS[kind], *tensors), by_definition(*tensors), 1e-12)


@pytest.mark.parametrize("C", [1, 2, 3, 31, 64])
@pytest.mark.parametrize("strength", [0.1, 0.5])
def test_both_ways_of_channel_decays_agree(C: int, strength: float):
    tensors = made(C, channel=True, strength=strength, seed=3)
    assert_agree(by_class(referenced, *tensors), by_class(levels, *tensors))


def constant(C: int, per_token: float) -> torch.Tensor:
    return torch.full((1, 1, C, 8), per_token)


def spread(total: float, rows: slice, C: int = 64) -> torch.Tensor:
    """Decays `[1, 1, C, 8]` whose binary logarithms sum up to `-total` over some tokens."""
    g = torch.zeros(1, 1, C, 8)
    g[:, :, rows] = -total / RCP_LN2 / len(range(C)[rows])
    return g


@pytest.mark.parametrize("half", [slice(0, 32), slice(32, 64)], ids=["first half", "second half"])
def test_threshold_between_the_two_ways(half: slice):
    """A half chunk may decay by REACH and no further, wherever in it; then halves and quarters of the chunk may do."""
    for rows in (half, slice(half.start + 5, half.start + 6), slice(half.start + 20, half.stop)):
        assert referenced_size(prepared(spread(REACH - 1e-3, rows))) == 64
        assert referenced_size(prepared(spread(REACH + 1e-3, rows))) < 64
    assert referenced_size(prepared(spread(2 * REACH - 1e-2, half))) == 32
    assert referenced_size(prepared(spread(4 * REACH - 1e-2, half))) == 16
    assert referenced_size(prepared(spread(4 * REACH + 1e-2, half))) == 0
    assert referenced_size(prepared(torch.full((1, 1, 64, 8), float("-inf")))) == 0
    assert referenced_size(torch.full((1, 1, 64, 8), float("nan"))) == 0


@given(C=st.integers(1, 64), strength=st.floats(0, 20), seed=st.integers(0, 9))
def test_pieces_keep_within_reach(C: int, strength: float, seed: int):
    """Whatever the length: in pieces of the size that is said to be safe, no exponent exceeds REACH."""
    g = prepared(made(C, channel=True, strength=strength, seed=seed)[1])
    size = referenced_size(g)
    assert 0 <= size <= C
    for start in range(0, C, size or C):
        piece = g[:, :, start : start + size] if size else g[:, :, :0]
        n = piece.shape[2]
        x = torch.matmul(stages._from_middle(n, g), piece) if n else piece
        # Sums of at most 64 numbers, added up in two different orders.
        assert x.abs().sum() == 0 or x.abs().max() <= REACH * (1 + 64 * 6e-8)


@pytest.mark.parametrize("C", [2, 16, 33, 64])
@pytest.mark.parametrize("uneven", [False, True])
def test_full_reach_on_both_sides_is_accurate(C: int, uneven: bool):
    """The largest factors there are, 2^60 times 2^60: products must not overflow."""
    middle = (C - 1) // 2 + 1
    sides = (slice(0, 1), slice(C - 1, C)) if uneven else (slice(0, middle), slice(middle, C))
    g = sum(spread(REACH - 1e-3, rows, C) for rows in sides)
    kq, _, *rest = made(C, channel=True, N=1, R=1)
    assert referenced_size(prepared(g)) == C
    tensors = (kq, g, *rest)
    assert_agree(by_class(referenced, *tensors), by_definition(*tensors), dg_scale=scale_of_dg(tensors))


def test_one_channel_out_of_reach_is_enough():
    g = made(64, channel=True)[1]
    assert referenced_size(prepared(g)) == 64
    g[1, 0, 40, 3] = -80.0
    assert referenced_size(prepared(g)) == 0


def test_what_decays_beyond_notice_is_exactly_zero():
    """Denormal numbers would slow products down 200 times."""
    x = torch.tensor([0.0, -1.0, -99.0, -101.0, -140.0, -1000.0, float("-inf")])
    assert stages.exp2_(x.clone()).tolist() == [1.0, 0.5, 2.0**-99, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", [ScalarDecay, ReferencedDecay, LevelDecay])
def test_layout_of_states(kind: Any):
    """Storing undoes loading, and loading copies: the caller's state is never worked on."""
    state = random(3, 6, 5, 4)
    loaded = kind.load_state(state, 2)
    assert loaded.data_ptr() != state.data_ptr()
    assert torch.equal(kind.store_state(loaded, 3), state)
    assert kind.load_state(state.mT.contiguous().mT, 2).is_contiguous()
