"""Evaluation of programs written down here, against what their loops do in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.compiler.evaluate import EvaluationError, Program, evaluate, launch
from fla_npu.compiler.hivm import parse
from tests.compiler.programs import GM, load, program

ROW = 8 * 4
INT32 = st.integers(-(2**31), 2**31 - 1)


def bytes_read(text, grid=1, program_id=0, scalars=None, arrays=None, names=()):
    totals = evaluate(Program(parse(text), names), program_id, grid, scalars, arrays)
    return totals.sum("gm", "AIV", "read", "user")


def loop(bound, body, start="%c0_i32", step="%c1_i32"):
    return f"    scf.for %i = {start} to {bound} step {step}  : i32 {{\n{body}    }}\n"


def element(where, name="%v"):
    """Reads one integer of the array."""
    kind = f"memref<1xi32, strided<[1], offset: ?>, {GM}>"
    return (
        f"    %at = memref.reinterpret_cast %arg4 to offset: [{where}], sizes: [1], strides: [1] : memref<?xi32, {GM}> "
        f"to {kind}\n    {name} = memref.load %at[%c0] : {kind}\n"
    )


@given(st.integers(-5, 40), st.integers(-5, 40), st.integers(1, 9))
def test_trips_of_a_loop(start, stop, step):
    text = program(loop("%arg6", load("16", 6), "%arg5", "%arg7"), scalars=3)
    names = ("x", "a", "start", "stop", "step")
    scalars = {"start": start, "stop": stop, "step": step}
    assert bytes_read(text, scalars=scalars, names=names) == 16 * ROW * len(range(start, stop, step))


@given(st.integers(0, 300), st.integers(1, 6))
def test_tail_sizes_over_a_grid(tokens, grid):
    """Programs take chunks of 16 rows in turn; the last is short."""
    maps = "#map = affine_map<(d0)[s0] -> (16, -d0 + s0)>\n#map1 = affine_map<()[s0] -> (s0 * 16)>\n"
    body = (
        "    %block = hivm.hir.get_block_idx -> i64\n"
        "    %id = arith.trunci %block : i64 to i32\n"
        "    %c16 = arith.constant 16 : i32\n"
        "    %first = arith.muli %id, %c16 : i32\n"
        "    %step = arith.muli %arg7, %c16 : i32\n"
        + loop(
            "%arg5",
            "      %t = arith.index_cast %i : i32 to index\n"
            "      %n = arith.index_cast %arg5 : i32 to index\n"
            "      %rows = affine.min #map(%t)[%n]\n" + load("%rows", 6),
            "%first",
            "%step",
        )
    )
    compiled = Program(parse(program(body, maps=maps)), ("x", "a", "tokens", "unused"))
    given_ = launch(grid, {"tokens": tokens})
    each = [compiled.totals(i, given_).sum("gm") for i in range(grid)]
    expected = [sum(min(16, tokens - t) * ROW for t in range(16 * i, tokens, 16 * grid)) for i in range(grid)]
    assert each == expected
    whole = compiled.launch_totals(given_)
    assert whole.sum("gm") == tokens * ROW
    assert whole.arguments == ({"x": {"read": tokens * ROW, "write": 0}} if tokens else {})


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_lengths_come_from_memory(lengths):
    """One loop over sequences, one over their rows: bounds are read from an array."""
    view = element("%where", "%length")
    inner = "      scf.for %j = %c0_i32 to %length step %c1_i32  : i32 {\n" + load("16", 8) + "      }\n"
    text = program(loop("%arg5", "      %where = arith.index_cast %i : i32 to index\n" + view + inner))
    got = bytes_read(text, scalars={"n": len(lengths)}, arrays={"a": lengths}, names=("x", "a", "n", "unused"))
    assert got == sum(lengths) * 16 * ROW


@given(st.integers(0, 10**6), st.integers(1, 50))
def test_while(start, divisor):
    """Halves a number until nothing is left, carrying it around the loop."""
    body = (
        "    %r = scf.while (%x = %arg5) : (i32) -> i32 {\n"
        "      %more = arith.cmpi sgt, %x, %c0_i32 : i32\n"
        "      scf.condition(%more) %x : i32\n"
        "    } do {\n"
        "    ^bb0(%y: i32):\n" + load("16", 6) + "      %c2 = arith.constant 2 : i32\n"
        "      %half = arith.divsi %y, %c2 : i32\n"
        "      scf.yield %half : i32\n"
        "    }\n" + loop("%r", load("16", 6))
    )
    got = bytes_read(program(body), scalars={"start": start}, names=("x", "a", "start", "unused"))
    assert got == start.bit_length() * 16 * ROW


@given(st.integers(-20, 20), st.integers(-20, 20))
def test_branches_with_results(a, b):
    body = (
        "    %less = arith.cmpi slt, %arg5, %arg6 : i32\n"
        "    %n = scf.if %less -> (i32) {\n"
        "      %d = arith.subi %arg6, %arg5 : i32\n"
        "      scf.yield %d : i32\n"
        "    } else {\n" + load("16", 6) + "      scf.yield %c0_i32 : i32\n"
        "    }\n" + loop("%n", load("16", 6))
    )
    got = bytes_read(program(body), scalars={"a": a, "b": b}, names=("x", "p", "a", "b"))
    assert got == (b - a if a < b else 1) * 16 * ROW


def np32(name, a, b):
    """The operation in 32-bit two's complement, by numpy and by definition."""
    x, y = np.int64(a), np.int64(b)
    quotient = int(abs(x) // abs(y)) * (1 if (a < 0) == (b < 0) else -1) if b else 0
    results = {
        "addi": x + y,
        "subi": x - y,
        "muli": np.int64((a * b + 2**31) % 2**32 - 2**31),
        "divsi": quotient,
        "remsi": a - b * quotient,
        "floordivsi": a // b if b else 0,
        "ceildivsi": -(-a // b) if b else 0,
        "minsi": min(a, b),
        "maxsi": max(a, b),
        "andi": x & y,
        "ori": x | y,
        "xori": x ^ y,
        "divui": (a % 2**32) // (b % 2**32) if b else 0,
        "remui": (a % 2**32) % (b % 2**32) if b else 0,
        "minui": min(a % 2**32, b % 2**32),
    }
    return int(np.int64(results[name]).astype(np.int32))


OPERATIONS = "addi subi muli divsi remsi floordivsi ceildivsi minsi maxsi andi ori xori divui remui minui"


@pytest.mark.parametrize("name", OPERATIONS.split())
@given(a=INT32, b=INT32.filter(bool))
def test_arithmetic_is_that_of_32_bits(name, a, b):
    """The result is read four bits at a time: a loop of 0 to 15 iterations for each."""
    body = f"    %r = arith.{name} %arg5, %arg6 : i32\n    %c15 = arith.constant 15 : i32\n"
    for i in range(8):
        body += f"    %s{i} = arith.constant {4 * i} : i32\n    %d{i} = arith.shrsi %r, %s{i} : i32\n"
        body += f"    %n{i} = arith.andi %d{i}, %c15 : i32\n" + loop(f"%n{i}", load(str(i + 1), 6))
    got = bytes_read(program(body), scalars={"a": a, "b": b}, names=("x", "p", "a", "b"))
    want = np32(name, a, b)
    assert got == sum(((want >> (4 * i)) & 15) * (i + 1) for i in range(8)) * ROW


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (loop("%arg5", load("16", 6)), "%arg5 in kernel is a loop's bound and depends on argument n"),
        (
            element("0") + loop("%v", load("16", 6)),
            "%v in kernel is a loop's bound and depends on contents of a",
        ),
        (
            "    %v = hivm.hir.unheard_of -> i32\n" + loop("%v", load("16", 6)),
            "%v in kernel is a loop's bound and depends on %v = hivm.hir.unheard_of",
        ),
        (
            "    %v = arith.divsi %c1_i32, %c0_i32 : i32\n" + loop("%v", load("16", 6)),
            "%v = arith.divsi divides by zero",
        ),
    ],
)
def test_what_is_not_known_is_named(body, message):
    with pytest.raises(EvaluationError, match=message.replace("(", r"\(")):
        bytes_read(program(body), names=("x", "a", "n", "unused"))


def test_a_read_outside_an_array_is_named():
    body = element("3") + loop("%v", load("16", 6))
    with pytest.raises(EvaluationError, match=r"%v reads a\[3\], which has 2 elements"):
        bytes_read(program(body), arrays={"a": [1, 2]}, names=("x", "a", "n", "unused"))


def test_unused_unknown_values_do_no_harm():
    body = "    %v = hivm.hir.unheard_of -> i32\n" + load("16")
    assert bytes_read(program(body)) == 16 * ROW


@pytest.mark.parametrize("ask", ["get_block_idx", "get_sub_block_idx"])
def test_loops_that_ask_where_they_run_are_not_taken_for_the_same(ask):
    """The outer loop reads nothing from outside; the inner one has as many iterations as the number asked for."""
    body = f"      %where = hivm.hir.{ask} -> i64\n      %n = arith.trunci %where : i64 to i32\n"
    inner = "      scf.for %j = %c0_i32 to %n step %c1_i32  : i32 {\n" + load("16", 8) + "      }\n"
    vector = program("    scf.for %i = %c0 to %c1 step %c1 {\n" + body + inner + "    }\n")
    # With a cube function beside it, both vector cores run the vector function.
    function = vector[vector.index("  func.func") : vector.rindex("}")]
    cube = function.replace("func_core_type<AIV>", "func_core_type<AIC>").replace("@kernel", "@cube")
    cube = cube.replace("to %n step", "to %c0_i32 step")
    totals = Program(parse(vector.replace(function, function + cube))).launch_totals(launch(3))
    # Programs 0, 1 and 2, twice each; or vector cores 0 and 1 of three programs.
    assert totals.sum("gm") == (2 * (0 + 1 + 2) if ask == "get_block_idx" else 3) * 16 * ROW


def test_another_launch_is_evaluated_anew():
    """Same scalars, another array: what loops did for the first launch says nothing about the second."""
    body = "    scf.for %i = %c0 to %c1 step %c1 {\n" + element("0") + loop("%v", load("16", 6)) + "    }\n"
    compiled = Program(parse(program(body)), ("x", "a", "n", "unused"))
    reads = [compiled.totals(0, launch(1, arrays={"a": [n]})).sum("gm") for n in (3, 5, 3)]
    assert reads == [n * 16 * ROW for n in (3, 5, 3)]


@pytest.mark.parametrize(("cast", "expected"), [("extsi", -1), ("extui", 1)])
def test_one_bit_extended(cast, expected):
    body = (
        f"    %yes = arith.cmpi eq, %c0_i32, %c0_i32 : i32\n    %n = arith.{cast} %yes : i1 to i32\n"
        "    %c3 = arith.constant 3 : i32\n    %m = arith.addi %n, %c3 : i32\n"
    )
    assert bytes_read(program(body + loop("%m", load("16", 6)))) == (3 + expected) * 16 * ROW


@pytest.mark.parametrize("grid", [0, (), (1, 2, 3, 4), (2, 0)])
def test_grid_is_checked(grid):
    with pytest.raises(ValueError, match="grid must be"):
        launch(grid)
