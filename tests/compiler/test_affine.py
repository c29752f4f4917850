"""Affine maps against their definition in integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.compiler.affine import parse

NUMBERS = st.integers(-(10**6), 10**6)
DIVISORS = st.integers(1, 1000)


@given(NUMBERS, NUMBERS, DIVISORS)
def test_division_rounds_as_affine_maps_do(a, b, n):
    down, up, rest = parse("(d0)[s0, s1] -> (d0 floordiv s1, (s0 - d0) ceildiv s1, d0 mod s1)")([a, b, n])
    assert n * down <= a < n * (down + 1)
    assert n * (up - 1) < b - a <= n * up
    assert rest == a - n * down


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, DIVISORS)
def test_a_map_of_the_compiler(s0, s1, s2, s3, s4):
    text = "()[s0, s1, s2, s3, s4] -> ((s0 floordiv 64 + ((s2 - s3) floordiv s4) * ((s1 + 63) floordiv 64)) mod 2)"
    assert parse(text)([s0, s1, s2, s3, s4]) == ((s0 // 64 + ((s2 - s3) // s4) * ((s1 + 63) // 64)) % 2,)


def test_signs_and_constants():
    assert parse("(d0) -> (-d0 + 7, 3, d0 * -2)")([5]) == (2, 3, -10)


@pytest.mark.parametrize("text", ["d0 -> d0", "(d0) -> (d0 ** 2)", "(d0) -> (print(d0))"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="affine"):
        parse(text)
