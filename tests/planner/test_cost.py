"""Costs: counts against sums done by hand, time by the properties that a pipeline has."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.planner import cost as module
from fla_npu.planner.chips import CHIPS, chip
from fla_npu.planner.cost import MACHINE, cost, schedule_cost, solve_steps
from fla_npu.planner.dataflow import ITEMSIZE, RECURRENCES, ChunkShape
from fla_npu.planner.mappings import NAMES
from fla_npu.planner.plan import plan
from tests.work import calls

MIB = 1 << 20
ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "sweep" / "compiled.json"


def of(op: str, mapping: str, **more: object) -> module.Cost:
    call = {"chip": chip("310P"), "heads": 16, "lengths": [1024], **more}
    return cost(op, mapping, **call)  # type: ignore[arg-type]


def test_head_moves_each_input_and_result_once() -> None:
    """By hand: q, k, v, o in 16 bits; g, beta and the states in 32."""
    T, H, D = 1000, 10, 128
    found = of("gdn", "head", heads=H, lengths=[T])
    assert sum(found.gm_read.values()) == T * H * (3 * D * 2 + 2 * 4) + H * D * D * 4
    assert sum(found.gm_written.values()) == T * H * D * 2 + H * D * D * 4
    assert found.peak_bytes == found.gm_bytes, "nothing else is allocated"
    assert found.launches == 1


def test_every_tile_of_a_head_loads_what_it_shares() -> None:
    """20 heads on 10 cores, as four tiles of each: q, k, g and beta are read by every tile, scores and Solve done by
    every tile, the products with columns of the state once."""
    C, D, T, H = 64, 128, 4096, 20
    whole, tiled = (of("gdn", "head", heads=H, lengths=[T], tiles=[tile]) for tile in (128, 32))
    for name, size in {"q": 2 * D, "k": 2 * D, "g": 4, "beta": 4}.items():
        assert tiled.gm_read[name] == 4 * T * H * size == 4 * whole.gm_read[name]
    assert tiled.gm_read["v"] == whole.gm_read["v"] == T * H * 2 * D
    assert tiled.gm_written == whole.gm_written
    repeated = T // C * H * (2 * C * C * D + C**3 // 2)
    assert tiled.macs == whole.macs + 3 * repeated
    assert 1.5 * whole.path_bytes["L1->L0"] < tiled.path_bytes["L1->L0"] < 4 * whole.path_bytes["L1->L0"]


def test_only_tiles_load_again() -> None:
    """16 heads on 36 cores: as tiles of half a head, where that ends earlier."""
    sizes = {"heads": 16, "lengths": [4096], "chip": chip("950")}
    whole, tiled = of("gdn", "head", **sizes, tiles=[128]), of("gdn", "head", **sizes, tiles=[128, 64])
    assert tiled.gm_read["q"] == 2 * whole.gm_read["q"] and tiled.seconds < whole.seconds
    assert tiled.macs == whole.macs + 16 * 64 * (2 * 64 * 64 * 128 + 64**3 // 2), "scores and Solve of a chunk, twice"
    uneven = of("gdn", "head", **{**sizes, "heads": 30, "lengths": [4096, 1000]}, tiles=[128, 64])
    tokens = uneven.gm_read["q"] / 256
    assert 30 * 5096 < tokens < 60 * 5096 and tokens % 2 == 0


def test_spills_are_those_of_the_plan() -> None:
    """KDA with keys of 256 on the 310P keeps nothing else than its plan does."""
    made = plan("kda", "310P", heads=16, seq=4096, K=256, tile=64, chunk=64)
    assert made.spilled
    found = of("kda", "head", heads=16, lengths=[4096], shape=made.shape, tiles=[64])
    stored = sum(
        one.rows * one.columns * ITEMSIZE[one.dtype]
        for one in made.tensors
        if one.memory == "GM" and one.name.endswith("@GM")
    )
    assert found.gm_written["spills"] == stored * 64 * 16
    assert found.gm_read["spills"] > 0


@pytest.mark.parametrize("mapping", NAMES)
def test_units_that_meet_in_global_memory_write_and_read_what_they_exchange(mapping: str) -> None:
    on, off = (of("gdn", mapping, chip=chip(name), heads=20, tiles=[128]) for name in ("310P", "910B3"))
    assert "workspace" not in on.gm_read
    if mapping == "separate":
        # Its operators take and give whole tensors in global memory.
        assert "workspace" not in off.gm_read
        return
    assert off.gm_read["workspace"] == off.gm_written["workspace"] > 0
    assert not {"UB->L1", "L0C->UB", "L0C->L1"} & set(off.path_bytes)
    if mapping == "head":
        # Of a chunk: S, A, P, T, u0, ur and u as operands; G, QK, QS, KS, Pu, u and Sd for vectors.
        operands, results = 128 * 128 + 3 * 64 * 64 + 3 * 64 * 128, 2 * 64 * 64 + 4 * 64 * 128 + 128 * 128
        assert off.gm_read["workspace"] == 20 * 16 * (2 * operands + 4 * results)
        assert off.gm_bytes == on.gm_bytes + 2 * off.gm_read["workspace"]
        assert off.peak_bytes == on.peak_bytes + 20 * (2 * operands + 4 * results)


STANDARD: dict[str, list[int]] = {
    "K": [16, 32, 64, 128, 256],
    "V": [16, 32, 48, 64, 96, 128, 256],
    "T": [1, 64, 100, 1000, 4096, 65536],
    "heads": [1, 4, 7, 10, 16, 22, 31, 49],
}


@pytest.mark.parametrize("size", STANDARD)
@pytest.mark.parametrize("op", ["gdn", "kda"])
@pytest.mark.parametrize("name", ["310P", "910B3", "950"])
def test_time_does_not_fall_as_sizes_grow(name: str, op: str, size: str) -> None:
    def seconds(value: int) -> float:
        given = {"K": 128, "V": 128, "T": 4096, "heads": 16} | {size: value}
        shape = ChunkShape(K=given["K"], V=given["V"])
        return of(op, "head", chip=chip(name), heads=given["heads"], lengths=[given["T"]], shape=shape).seconds

    found = [seconds(value) for value in STANDARD[size]]
    if size == "V":
        # Layouts are chosen by what vectors and transforms take, not by the pipeline.
        assert found.pop(0) < 1.03 * found[0]
    assert found == sorted(found)


@pytest.mark.parametrize("name", ["310P", "910B3", "950"])
def test_operands_of_32_bits_are_no_quicker(name: str) -> None:
    found = [of("gdn", "head", chip=chip(name), shape=ChunkShape(dtype=dtype)).seconds for dtype in ("fp16", "fp32")]
    assert found == sorted(found)


def test_time_does_not_fall_as_a_chip_shrinks() -> None:
    whole = chip("310P")
    for heads in (8, 16, 20):
        cores = [replace(whole, aicores=n, vector_cores=n) for n in (40, 16, 10, 8, 4, 2, 1)]
        found = [of("gdn", "head", chip=one, heads=heads, lengths=[4096]).seconds for one in cores]
        # Two rounds of 8 cores have more of the memory than rounds of 10 and 6: less than a thousandth.
        assert all(fewer > 0.999 * more for more, fewer in pairwise(found)), (heads, found)
    clocks = [replace(whole, rates=replace(whole.rates, hertz=hertz)) for hertz in (4e9, 1e9, 2e8)]
    memories = [replace(whole, bandwidths=replace(whole.bandwidths, gm_total=rate)) for rate in (4e11, 1e11, 2e10)]
    for chips in (clocks, memories):
        found = [of("gdn", "head", chip=one).seconds for one in chips]
        assert found == sorted(found) and found[0] < found[-1]


def test_idle_cores_leave_their_share_of_memory() -> None:
    """8 heads on 10 cores of a slow memory: as quick as on 8 cores."""
    few, many = (
        replace(chip("310P"), aicores=n, vector_cores=n, bandwidths=replace(chip("310P").bandwidths, gm_total=4e10))
        for n in (8, 10)
    )
    found = [of("gdn", "head", chip=one, heads=8, tiles=[128]).seconds for one in (few, many)]
    assert found[0] == found[1]
    assert of("gdn", "head", chip=many, heads=10, tiles=[128]).seconds > found[1]


@pytest.mark.parametrize("mapping", NAMES)
def test_no_length_is_too_long(mapping: str) -> None:
    assert of("gdn", mapping, lengths=[10**15]).seconds > 1e6
    few, many = (calls(of, "gdn", mapping, lengths=[length]) for length in (10**6, 10**15))
    assert many < 1.1 * few


@pytest.mark.parametrize(("op", "name", "K", "V"), [
    ("gdn", "310P", 64, 32), ("gdn", "910B3", 64, 128), ("gdn", "950", 128, 32), ("kda", "950", 64, 64),
])  # fmt: skip
def test_plans_and_costs_have_one_order(op: str, name: str, K: int, V: int) -> None:
    made = plan(op, name, heads=16, seq=4096, K=K, V=V)
    shape = made.shape
    call = module._Chunk(op, "head", "head", shape, shape.V, chip(name), "planned", -(-4096 // shape.C))
    done = [one.name for one in module._program(call).instructions if one.name in made.order]
    assert done == list(made.order)


def test_fla_by_hand() -> None:
    """Reads and writes of its six kernels, per token and head; the state per chunk."""
    T, H, D, C = 2048, 10, 128, 64
    found = of("gdn", "fla", heads=H, lengths=[T])
    row, score, number = D * 2, C * 2, 4
    read = {
        "cumsum": number,
        "kkt": row + 2 * number,
        "solve": 2 * score,
        "wu": 2 * row + 2 * number + score,
        "h": 3 * row + number,
        "o": 3 * row + number,
    }
    write = {"cumsum": number, "kkt": 2 * score, "solve": score, "wu": 2 * row, "h": row, "o": row}
    tokens, states = T * H, T // C * H * D * D * 2
    assert sum(found.gm_read.values()) == tokens * sum(read.values()) + states + H * D * D * 4
    assert sum(found.gm_written.values()) == tokens * sum(write.values()) + states + H * D * D * 4
    inputs = tokens * (3 * row + 2 * number) + 2 * H * D * D * 4
    assert found.peak_bytes == inputs + tokens * (number + score + 2 * row) + states + tokens * row


@pytest.mark.parametrize("op", RECURRENCES)
@pytest.mark.parametrize("mapping", NAMES)
def test_every_mapping_of_every_op_has_a_cost(op: str, mapping: str) -> None:
    found = of(op, mapping, lengths=[4096, 100])
    assert found.seconds > 0
    assert found.gm_bytes >= of(op, "head", lengths=[4096, 100]).gm_bytes
    assert found.peak_bytes >= of(op, "head", lengths=[4096, 100]).peak_bytes
    assert found.macs > 0
    assert found.seconds == pytest.approx(sum(found.stages.values()) + found.submission_seconds)


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_has_a_cost(name: str) -> None:
    found = of("gdn", "head", chip=chip(name))
    assert 0 < found.seconds < 1
    assert (found.joules is None) == (chip(name).board_watts is None)


@pytest.mark.parametrize(("dtype", "per_cycle"), [("fp16", 4096), ("fp32", 2048)])
def test_products_of_32_bits_have_their_own_rate(dtype: str, per_cycle: int) -> None:
    """Solve on the 950, which loads little: 64^3 / 2 products."""
    call = module._Chunk("gdn", "head", "head", ChunkShape(dtype=dtype), 128, chip("950"), "planned")
    (solve,) = (one for one in module._program(call).instructions if one.name == "T")
    assert solve.seconds == pytest.approx(64**3 / 2 / (per_cycle * 1.8e9))


def test_unknown_ways_between_units_are_those_of_such_chips() -> None:
    """Nothing is known of the 910_9363 but that its units meet in global memory."""
    like = chip("310P").bandwidths
    rates = [module._rate(chip("910_9363"), *way, 20) for way in (("UB", "L1"), ("L0C", "UB"), ("L0C", "L1"))]
    assert rates == [like.ub_to_gm_to_l1] * 3
    assert module._rate(chip("310B1"), "UB", "L1", 1) == like.ub_to_l1


@pytest.mark.parametrize(("op", "places"), [("gdn", 2), ("kda", 1)])
def test_inputs_with_one_place_are_not_loaded_early(op: str, places: int) -> None:
    """KDA leaves the 310P's UB room for one place of each; its plan says so, too."""
    made = plan(op, "310P", heads=16, seq=4096)
    call = module._Chunk(op, "head", "head", ChunkShape(), 128, chip("310P"), "planned")
    program = module._program(call)
    assert program.places == made.buffers == places
    assert [one.name for one in program.instructions if one.name in made.order] == list(made.order)
    step = module._step(call, MACHINE.operator)
    assert step.seconds == pytest.approx(step.first) if places == 1 else step.seconds < 0.99 * step.first


def test_variants_get_better_one_by_one() -> None:
    for op in ("gdn", "kda"):
        fla, *variants = of(op, "fla").seconds, *(of(op, "head", variant=v).seconds for v in module.VARIANTS)
        assert [fla, *variants] == sorted([fla, *variants], reverse=True)
    spilled = of("gdn", "head", variant="mapped").gm_bytes - of("gdn", "head").gm_bytes
    assert spilled == 64 * 1024 * 16 * 16, "one state per chunk and head"


def test_segments_are_three_launches_and_products() -> None:
    """One head of 65536 tokens on the 910B3, which the launchers cut. By hand: all tokens are read three times, the
    values twice; outputs are written thrice; states of 64 KiB."""
    T, n, D, state = 65536, 5, 128, 128 * 128 * 4
    call = {"chip": chip("910B3"), "heads": 1, "lengths": [T], "tiles": [D]}
    lengths = [T // 4, T // 4, T // 4, T // 8, T // 8]
    whole, cut = of("gdn", "head", **call), of("gdn", "head", **call, segments=[lengths])
    assert cut.launches == 3 + 2 * n
    assert sum(cut.gm_read.values()) - cut.gm_read.get("workspace", 0) == T * (8 * D * 2 + 3 * 2 * 4) + n * 6 * state
    assert sum(cut.gm_written.values()) - cut.gm_written.get("workspace", 0) == 3 * T * D * 2 + n * 5 * state
    assert cut.macs == 3 * whole.macs + n * D**3
    assert set(cut.stages) == {"final states", "transitions", "products", "head"}
    assert cut.stages["head"] < whole.stages["head"]


def test_segments_are_those_of_the_sequences() -> None:
    with pytest.raises(ValueError, match=r"segments must divide the lengths \[1024\], got \[\[512, 500\]\]"):
        of("gdn", "head", segments=[[512, 500]])
    with pytest.raises(ValueError, match="segments must be None for fla"):
        of("gdn", "fla", segments=[[512, 512]])


@settings(max_examples=25, deadline=None)
@given(
    op=st.sampled_from(sorted(RECURRENCES)),
    mapping=st.sampled_from(NAMES),
    heads=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
)
def test_more_work_costs_no_less(op: str, mapping: str, heads: int, lengths: list[int]) -> None:
    # With tiles of heads work is done twice where that ends earlier.
    less = of(op, mapping, heads=heads, lengths=lengths, tiles=[128])
    more = of(op, mapping, heads=heads, lengths=[*lengths, 64], tiles=[128])
    # FlashQLA chooses its segments by the size of the call: more tokens may make fewer of them.
    for figure in ("gm_bytes", "macs", "element_ops", "peak_bytes", "launches") if mapping != "flashqla" else ():
        assert getattr(more, figure) >= getattr(less, figure), figure
    less = of(op, mapping, heads=heads, lengths=lengths)
    twice = replace(MACHINE, operator=2 * MACHINE.operator, item=2 * MACHINE.item, launch=2 * MACHINE.launch)
    slower = of(op, mapping, heads=heads, lengths=lengths, machine=twice).seconds
    # Schedules are within 4/3 of the best (schedule.py), and so are comparisons of two.
    assert less.seconds * 3 / 4 <= slower <= 2 * less.seconds * 4 / 3


def test_time_is_bounded_by_its_engines() -> None:
    """With free issues, a core is as fast as its busiest engine at least, and not slower than all one by one."""
    free = module.Machine(0.0, 0.0, 0.0)
    found = of("gdn", "head", heads=10, lengths=[64 * 100], machine=free)
    program = module._program(module._Chunk("gdn", "head", "head", ChunkShape(), 128, chip("310P"), "planned"))
    work: dict[str, float] = defaultdict(float)
    for one in program.instructions:
        work[one.engine] += one.seconds
    assert 99 * max(work.values()) <= found.seconds <= 101 * sum(work.values())


@pytest.mark.parametrize("mapping", NAMES)
def test_long_and_wide_calls_need_little_work(mapping: str) -> None:
    """A million calls of functions at most; those heads have a million chunks and more, of dozens of instructions."""
    assert calls(of, "kda", mapping, heads=64, lengths=[1 << 20]) < 1_500_000
    assert calls(of, "kda", mapping, heads=64, lengths=[1000 + n for n in range(1000)]) < 1_500_000


@pytest.mark.parametrize(("C", "steps"), [(16, 15), (32, 21), (64, 27), (128, 33), (8, 7)])
def test_steps_of_the_solve(C: int, steps: int) -> None:
    assert solve_steps(C) == steps


def test_schedule_cost_is_what_the_compiled_programs_say() -> None:
    rows = json.loads(ROWS.read_text())["rows"]
    case = {
        "precision": "exact",
        "dtype": "bf16",
        "K": 128,
        "V": 128,
        "chip": "910B3",
        "kind": "compiled",
        "bounded": True,
    }
    for kernel, op in (("chunk_gdn", "gdn"), ("chunk_kda", "kda")):
        points = {}
        for width in (32, 64, 128):
            config = dict.fromkeys(rows[0]["config"]) | {"chunk": 64, "width": width, "tile": 0, "multibuffer": True}
            (row,) = (one for one in rows if {**one, "op": kernel, "config": config, **case} == one)
            points[width] = row["cycles"] * width / 128
        x, y = sum(points) / 3, sum(points.values()) / 3
        slope = sum((a - x) * (b - y) for a, b in points.items()) / sum((a - x) ** 2 for a in points)
        assert schedule_cost(op).fixed == round(y / slope - x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 0}, "heads must be a positive int, got 0"),
        ({"lengths": []}, "lengths must be positive ints"),
        ({"lengths": [64, 0]}, "lengths must be positive ints"),
        ({"variant": "best"}, "variant must be one of mapped"),
    ],
)
def test_impossible_calls_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of("gdn", "head", **changes)
    with pytest.raises(ValueError, match="op must be"):
        schedule_cost("rwkv")
