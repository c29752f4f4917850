"""Both ways of the Solve stage against float64, and why the doubling inverse is none of them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.ops.common.solve import blocked_solve, solve_unit_lower
from fla_npu.testing import nmse

SOLVERS = (solve_unit_lower, blocked_solve)

# Substitution is backward stable: the error is some 1e-7 times the condition of a system, and those of the delta rule
# (rows of A at most beta times a cosine) stay below 1e3 in the cases here. (1e-7 * 10)^2 leaves room for typical ones.
BOUND = 1e-12


def system(C: int, *, N: int = 3, V: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """`strict_lower(beta k_i . k_j)` of unit keys of 16 channels, and a right side."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.nn.functional.normalize(torch.randn(N, C, 16, generator=generator), dim=-1)
    beta = torch.rand(N, C, 1, generator=generator)
    return (beta * (k @ k.mT)).tril(-1), torch.randn(N, C, V, generator=generator)


def exact(A: torch.Tensor, b: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    M = torch.eye(A.shape[-1], dtype=torch.float64) + A.double().tril(-1)
    return torch.linalg.solve(M.mT if transpose else M, b.double())


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("transpose", [False, True])
@given(C=st.integers(1, 64), V=st.sampled_from([1, 5, 64]), seed=st.integers(0, 99))
def test_against_lapack(solve: Any, transpose: bool, C: int, V: int, seed: int):
    A, b = system(C, V=V, seed=seed)
    x = solve(A, b, transpose=transpose)
    assert x.shape == b.shape and nmse(x, exact(A, b, transpose)) < BOUND


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("C", [1, 2, 15, 16, 17, 40, 64])
@pytest.mark.parametrize("garbage", [3.0, 1e30, float("inf"), float("nan")])
def test_only_what_is_below_the_diagonal_counts(solve: Any, transpose: bool, C: int, garbage: float):
    A, b = system(C)
    dirty = A + torch.full_like(A, garbage).triu()
    assert torch.equal(solve(dirty, b, transpose=transpose), solve(A, b, transpose=transpose))


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("transpose", [False, True])
def test_arguments_are_left_alone_and_may_be_strided(solve: Any, transpose: bool):
    A, b = system(33)
    strided_A, strided_b = torch.stack((A, A), -1)[..., 0], b.mT.contiguous().mT
    versions = A._version, b._version
    x = solve(A, b, transpose=transpose)
    assert (A._version, b._version) == versions
    assert nmse(solve(strided_A, strided_b, transpose=transpose), x) < BOUND


@pytest.mark.parametrize("solve", SOLVERS)
def test_in_float64(solve: Any):
    A, b = (x.double() for x in system(50))
    assert nmse(solve(A, b), exact(A, b)) < 1e-28


def doubling_inverse(A: torch.Tensor) -> torch.Tensor:
    """`(I + A)^-1 = (I - A)(I + A^2)(I + A^4)...`, exact for nilpotent A in exact arithmetic."""
    unit = torch.eye(A.shape[-1], dtype=A.dtype)
    inverse, power = unit - A, A @ A
    for _ in range((A.shape[-1] - 1).bit_length() - 1):
        inverse, power = inverse @ (unit + power), power @ power
    return inverse


def test_doubling_fails_on_equal_keys_and_substitution_does_not():
    """Equal keys, beta .99, g -1e-3: what repeated tokens and padding give, in a chunk of 64."""
    i = torch.arange(64.0)
    A = (0.99 * torch.exp(-1e-3 * (i[:, None] - i))).tril(-1)[None]
    b = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0))
    few_A, few_b = A[:, :16, :16].double(), b[:, :16].double()
    assert nmse(doubling_inverse(few_A) @ few_b, exact(few_A, few_b)) < 1e-20, "the formula itself is right"
    # Powers of A grow to C(63, 31) = 9e17 before they cancel, which takes more digits than float32 has.
    assert not nmse(doubling_inverse(A) @ b, exact(A, b)) < 1e3
    for solve in SOLVERS:
        for transpose in (False, True):
            assert nmse(solve(A, b, transpose=transpose), exact(A, b, transpose)) < BOUND
