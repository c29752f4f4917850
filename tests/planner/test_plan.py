"""Plans: never more than a chip's memories hold, the same everywhere, exact in JSON; and what cannot be planned."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.ops.common import tune
from fla_npu.planner.chips import CHIPS, chip
from fla_npu.planner.cost import cost
from fla_npu.planner.dataflow import ITEMSIZE, RECURRENCES, placed, rewritten, semantic
from fla_npu.planner.layout import occupied, plan_layouts
from fla_npu.planner.mappings import NAMES
from fla_npu.planner.order import fit, occupancy
from fla_npu.planner.plan import Plan, plan, written
from fla_npu.planner.report import text
from fla_npu.planner.request import MOST_SEQUENCES, MOST_TOKENS

CASES = {
    "gdn": ("gdn", "310P", {"heads": 16, "seq": 4096}),
    "kda": ("kda", "310P", {"heads": 16, "seq": 4096}),
    "kernel": ("gdn", "910B3", {"heads": 32, "seq": 8192, "dtype": "bf16"}),
    "pack": ("kda", "910B1", {"heads": 6, "lengths": [100, 0, 4096, 33]}),
    "segments": ("gdn", "910B3", {"heads": 1, "seq": 65536}),
    "odd": ("gla", "310B1", {"heads": 3, "seq": 65, "batch": 2, "K": 100, "V": 70}),
    "wide": ("ssd", "950", {"heads": 5, "seq": 1000, "K": 256, "V": 200}),
}


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest) -> Plan:
    op, name, call = CASES[request.param]
    return plan(op, name, **call)


def test_json_gives_the_plan_back(made: Plan):
    again = Plan.from_json(made.to_json())
    assert again == made and hash(again) == hash(made) and again.to_json() == made.to_json()
    assert json.loads(made.to_json())["schema"] == "fla_npu.plan/1"


def test_steps_are_an_order_of_the_graph(made: Plan):
    """Whatever was spilled, the operators of the rewritten graph are all there, each after what it reads."""
    graph = placed(rewritten(semantic(made.request.op, made.shape)), chip(made.request.chip))
    assert set(made.order) >= {one.name for one in graph.operators}
    assert len(set(made.order)) == len(made.order)
    if not made.spilled:
        # `occupancy` refuses an order that runs an operator too early.
        live = occupancy(graph, made.order, made.buffers)
        for step, alive in zip(made.steps, zip(*live.values(), strict=True), strict=True):
            assert step.live[1:] == alive[1:]
            assert step.live[0] >= alive[0], "UB has copies in other layouts besides"


def test_peaks_are_those_of_the_steps_and_fit(made: Plan):
    for at, memory in enumerate(made.memories):
        assert memory.peak == max(step.live[at] for step in made.steps)
        assert memory.bytes is not None and memory.peak <= memory.bytes


def test_cores_share_all_columns_of_all_heads(made: Plan):
    columns: dict[tuple[int, int], int] = {}
    for spans in made.timeline():
        assert [span.start for span in spans] == [0, *(span.end for span in spans)][:-1]
        assert all(span.end <= made.dealt.makespan for span in spans)
        for span in spans:
            place = span.item.sequence, span.item.head
            columns[place] = columns.get(place, 0) + span.item.columns
    cut = made.dealt.segments
    heads, sequences = made.request.heads, len(made.request.lengths) if cut is None else sum(map(len, cut))
    assert columns == {
        (sequence, head): -(-made.request.V // 16) * 16 for sequence in range(sequences) for head in range(heads)
    }
    assert max(spans[-1].end for spans in made.timeline() if spans) == made.dealt.makespan


def test_predictions_are_of_all_mappings_and_ours_is_last(made: Plan):
    assert {one.mapping for one in made.predictions} == set(NAMES)
    ours = made.predictions[-1]
    assert ours.mapping == "head" and ours.seconds > 0
    if made.dealt.segments is None:
        assert ours.launches == 1
        # Tiles of a head load what they share once each.
        if made.dealt.parts == 1 and made.dealt.units == made.request.heads * len(made.request.lengths):
            assert all(one.gm_read >= ours.gm_read for one in made.predictions)


def test_predictions_of_a_call_in_segments_are_of_its_three_launches():
    """Segments from a state of zeros, from the identity, and from their states: see `ops/common/segments.py`."""
    made = plan("gdn", "910B3", heads=1, lengths=[0, 65536, 100], V=32)
    cut, ours = made.dealt.segments, made.predictions[-1]
    assert cut is not None and [sum(sequence) for sequence in cut] == [0, 65536, 100]
    assert [name for name, _ in ours.stages[:3]] == ["final states", "transitions", "head"]
    whole = cost(
        "gdn", "head", chip=chip("910B3"), heads=1, lengths=[65536, 100],
        shape=made.shape, tiles=made.config.tiles,
    )  # fmt: skip
    assert ours.launches > 3 * whole.launches and ours.macs > 3 * whole.macs
    assert 2 * sum(whole.gm_read.values()) < ours.gm_read
    # A launch ends with its longest segment.
    longest = max(map(max, filter(None, cut)))
    shortest_time = whole.stages["head"] * longest / 65536
    assert dict(ours.stages)["head"] == pytest.approx(shortest_time, rel=0.05)
    spans = [span for core in made.timeline() for span in core]
    assert {span.item.sequence for span in spans} == set(range(sum(map(len, cut))))


def test_a_tail_is_not_promised():
    made = plan("gdn", "310P", heads=16, seq=4096)
    assert made.dealt.tail == 6
    line = "  6 heads would end earlier chunk by chunk on all cores: not done, not in the predictions"
    assert line in text(made).splitlines()


def test_report_stays_within_its_columns(made: Plan):
    lines = text(made, compare=True).splitlines()
    assert max(map(len, lines)) <= 100
    assert all(any(line.split()[1:2] == [name] for line in lines) for name in made.order)


@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("name", ["310P", "310B1", "950"])
def test_without_a_kernel_the_schedule_is_the_predicted_one(name, K):
    made = plan("kda", name, heads=18, lengths=[4096, 100, 900], K=K, V=K)
    ours = made.predictions[-1]
    assert ours.seconds - ours.submission_seconds == pytest.approx(made.dealt.makespan * 1e-12, rel=1e-9)


def test_of_the_sizes_that_fit_the_quickest_are_taken():
    """Keys of 256 leave the 310P room for 64 tokens and 32 columns, or for 32 tokens and 64 columns."""
    call = {"heads": 16, "seq": 4096, "K": 256, "V": 256}
    made = plan("kda", "310P", **call)
    others = [plan("kda", "310P", chunk=64, tile=32, **call), plan("kda", "310P", chunk=32, tile=64, **call)]
    assert all(not one.spilled for one in [made, *others])
    assert made.predictions[-1].seconds == min(one.predictions[-1].seconds for one in others)


NUMBERS = st.integers(1, 256)


@given(
    op=st.sampled_from(sorted(RECURRENCES)),
    name=st.sampled_from(sorted(CHIPS)),
    heads=st.integers(1, 70),
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=5).filter(any),
    K=NUMBERS,
    V=NUMBERS,
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_no_plan_exceeds_a_memory(op, name, heads, lengths, K, V, data):
    dtypes = [one for one in chip(name).matrix_dtypes if one in ITEMSIZE]
    made = plan(op, name, heads=heads, lengths=lengths, K=K, V=V, dtype=data.draw(st.sampled_from(dtypes)))
    for memory in made.memories:
        assert memory.bytes is None or memory.peak <= memory.bytes
    assert made.shape.K >= K and made.config.width <= 128
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize(("op", "C", "K", "V"), [("kda", 64, 128, 16), ("kda", 64, 256, 16), ("gla", 64, 128, 64)])
def test_copies_in_other_layouts_fit_as_well(op, C, K, V):
    """The best order of these leaves too little of the 310P's UB for what its layouts add."""
    made = plan(op, "310P", heads=4, seq=4096, K=K, V=V, chunk=C, tile=V)
    graph = placed(rewritten(semantic(op, made.shape)), chip("310P"))
    plain = fit(graph, chip("310P"))
    assert (
        max(occupied(graph, plain.order, plan_layouts(graph, chip("310P"), 64), plain.buffers)) > made.memories[0].bytes
    )
    assert made.memories[0].peak <= made.memories[0].bytes


def test_other_processes_make_the_same_bytes():
    """Sets and dicts of another process have other hashes, this one's are random."""
    code = (
        "from fla_npu.planner.plan import plan\n"
        "for op, chip in (('kda', '310P'), ('gdn', '910B3')):\n"
        "    print(plan(op, chip, heads=18, lengths=[5000, 70, 1, 4096]).to_json())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "31337"},
    )
    here = [plan(op, name, heads=18, lengths=[5000, 70, 1, 4096]) for op, name in (("kda", "310P"), ("gdn", "910B3"))]
    assert found.stdout.splitlines() == [one.to_json() for one in here]


def test_a_plan_says_whether_its_configuration_was_tuned_here(tmp_path, monkeypatch):
    """Elsewhere, and with FLA_NPU_TUNE=0, it is another."""
    call = {"heads": 32, "seq": 8192}
    shipped = plan("gdn", "910B3", **call)
    assert shipped.chosen == "shipped" and plan("gdn", "310P", **call).chosen == "planned"
    monkeypatch.setenv("FLA_NPU_CACHE", str(tmp_path))
    found = replace(shipped.config, chunk=32)
    key = tune.key_for(
        "chunk_gdn", "910B3", 128, 128, "fp16", False, heads=32, sequences=1, length=8192, cores=20
    )  # fmt: skip
    try:
        tune.store(key, tune.Result(found, 1.0, (), 0))
        made = plan("gdn", "910B3", **call)
        assert made.config == found and made.chosen == "tuned"
        assert "were tuned for chunk_gdn on this machine" in made.remarks[0]
        assert Plan.from_json(made.to_json()) == made
        # Sizes that were asked for hide what was tuned.
        assert plan("gdn", "910B3", chunk=64, **call).chosen == "shipped"
        monkeypatch.setenv("FLA_NPU_TUNE", "0")
        assert plan("gdn", "910B3", **call) == shipped
    finally:
        tune._chosen.cache_clear()


LARGEST = {
    "one sequence": f"heads=64, seq={MOST_TOKENS}",
    "equal": f"heads=64, seq={MOST_TOKENS}, batch={MOST_SEQUENCES}",
    "unequal": f"heads=64, lengths=[1 + 7919 * n % 30_000 for n in range({MOST_SEQUENCES})]",
    "wide": f"heads=64, seq={2**20}, batch=8, K=256, V=256",
}


@pytest.mark.parametrize(
    ("op", "name", "case"),
    [
        ("kda", "310P", "wide"),
        ("kda", "310P", "unequal"),
        ("gdn", "910B3", "equal"),
        ("gdn", "910B3", "one sequence"),
    ],
)
def test_the_largest_calls_need_little_work(op, name, case):
    """In a process of their own, where nothing is remembered.

    Four million calls of functions at most, a second or two. Their heads have a million chunks and more, of dozens of
    instructions, which nothing may visit one by one.
    """
    code = (
        "from fla_npu.planner.plan import plan\n"
        "from tests.work import calls\n"
        f"print(calls(plan, {op!r}, {name!r}, {LARGEST[case]}))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(found.stdout) < 6_000_000


# What cannot be planned


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"op": "softmax"}, ValueError, "op must be one of gdn, kda"),
        ({"op": 3}, TypeError, "op must be a str, got int"),
        ({"chip": "310Q"}, ValueError, "chip must be one of 310P.*did you mean 310P"),
        ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
        ({"heads": 1.5}, TypeError, "heads must be an int, got float"),
        ({"seq": 0}, ValueError, "seq must be at least 1, got 0"),
        ({"seq": None}, ValueError, "lengths or seq must say how many tokens there are, got neither"),
        ({"lengths": [4]}, ValueError, "got both"),
        ({"seq": None, "lengths": [4], "batch": 2}, ValueError, "batch must be 1"),
        ({"seq": None, "lengths": [0, 0]}, ValueError, "lengths must have at least one token"),
        ({"seq": None, "lengths": [4, -1]}, ValueError, "lengths must be at least 0, got -1"),
        ({"K": 0}, ValueError, "K must be at least 1"),
        ({"dtype": "bf16"}, ValueError, "dtype must be one that 310P multiplies, fp16, got 'bf16'"),
        ({"precision": "sloppy"}, ValueError, "precision must be exact or fast, got 'sloppy'"),
        ({"chunk": 48}, ValueError, "chunk must be one of 64, 32, 16, got 48"),
        ({"tile": 0}, ValueError, "tile must be one of 128, 64, 32, 16, got 0"),
        ({"chip": "910B3", "chunk": 0}, ValueError, "chunk must be one of 64, 32, 16, got 0"),
        ({"tile": 128.0}, TypeError, "tile must be an int, got float"),
        ({"heads": True}, TypeError, "heads must be an int, got bool"),
        ({"seq": None, "lengths": 5}, TypeError, "lengths must be a sequence of ints, got int"),
        ({"seq": None, "lengths": [1] * 4097}, ValueError, "lengths must be at most 4,096 sequences, got 4,097"),
        ({"batch": 10**6}, ValueError, "batch must be at most 4,096 sequences, got 1,000,000"),
        ({"seq": 2**31}, ValueError, "lengths must be at most 2,147,483,647 tokens each, got 2,147,483,648"),
        ({"bounded": "no"}, TypeError, "bounded must be a bool, got 'no'"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    call = {"op": "gdn", "chip": "310P", "heads": 16, "seq": 4096, **change}
    with pytest.raises(error, match=message):
        plan(call.pop("op"), call.pop("chip"), **call)


class Integer:
    """As NumPy's: no int, but as good as one."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_integers_of_other_types_are_ints():
    plain = {"heads": 4, "K": 64, "V": 32, "chunk": 32, "tile": 16}
    like = {name: Integer(value) for name, value in plain.items()}
    made = plan("gdn", "310P", lengths=iter([Integer(100), 30]), **like)
    assert made == plan("gdn", "310P", lengths=[100, 30], **plain)
    assert Plan.from_json(made.to_json()) == made


def test_keys_that_do_not_fit_are_told_what_would():
    with pytest.raises(ValueError, match=r"K must be at most \d+ for gdn with fp16 on 310P, got 5000") as caught:
        plan("gdn", "310P", heads=16, seq=4096, K=5000)
    largest = int(str(caught.value).split("at most ")[1].split()[0])
    assert plan("gdn", "310P", heads=16, seq=4096, K=largest).memories
    with pytest.raises(ValueError, match=f"K must be at most {largest}"):
        plan("gdn", "310P", heads=16, seq=4096, K=largest + 1)


def test_sizes_that_do_not_fit_are_told_what_would():
    call = {"heads": 16, "seq": 4096, "K": 512, "V": 128}
    with pytest.raises(
        ValueError, match=r"got chunk=64, tile=128: .* bytes of .*; chunk=\d+, tile=\d+ would"
    ) as caught:
        plan("kda", "310P", chunk=64, tile=128, **call)
    sizes = {
        part.split("=")[0]: int(part.split("=")[1].split()[0]) for part in str(caught.value).split("; ")[-1].split(", ")
    }
    assert plan("kda", "310P", **sizes, **call).config.chunk == sizes["chunk"]


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


def changed(*path: Any) -> Callable[[Any], Any]:
    """A plan with another value at the end of a path."""
    first, *rest = path

    def change(record: Any) -> Any:
        made = dict(record) if isinstance(record, dict) else dict(enumerate(record))
        assert first in made
        made[first] = changed(*rest)(made[first]) if len(rest) > 1 else rest[0]
        return made if isinstance(record, dict) else list(made.values())

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: "no", "schema of a plan must be"),
        (lambda record: {**record, "schema": "fla_npu.plan/0"}, "got 'fla_npu.plan/0'"),
        (lambda record: {**record, "more": 1}, "plan must have request, "),
        (lambda record: {name: value for name, value in record.items() if name != "steps"}, "plan must have"),
        (lambda record: {**record, "buffers": "2"}, "plan.buffers must be int, got '2'"),
        (lambda record: {**record, "state": "round"}, "plan.state must be"),
        (lambda record: {**record, "spilled": [1]}, r"plan.spilled\[0\] must be str, got 1"),
        (lambda record: {**record, "spilled": nested(400)}, r"plan.spilled\[0\] must be str, got \[\[\["),
        (changed("request", "heads", -1), "plan.request.heads must be finite and not negative, got -1"),
        (changed("request", "heads", 0), "plan.request: heads must be at least 1, got 0"),
        (changed("request", "op", "zz"), "plan.request: op must be one of gdn, kda"),
        (changed("request", "chip", "zz"), "plan.request: chip must be one of 310P"),
        (changed("request", "chip", "ascend310p"), "plan.request.chip must be 310P"),
        (changed("request", "dtype", "zz"), "plan.request: dtype must be one that 310P multiplies"),
        (changed("request", "lengths", []), "plan.request: lengths must have at least one token"),
        (changed("request", "bounded", 1), "plan.request.bounded must be bool, got 1"),
        (changed("config", "chunk", 48), "plan.config: chunk must be 16, 32 or 64, got 48"),
        (changed("config", "width", True), "plan.config.width must be int, got True"),
        (changed("kernel", "chunk_gdn"), "plan.kernel must be None"),
        (changed("chosen", "tuned"), "plan.chosen must be planned"),
        (changed("memories", 0, "peak", 2**20), "plan.memories.0.: peak must be at most the 262144 bytes of UB"),
        (changed("memories", 0, "peak", 1), r"plan.memories\[0\].peak must be \d+ with"),
        (changed("memories", []), r"plan.memories must be \[\('UB', 262144\)"),
        (changed("buffers", 3), "plan.buffers must be 2"),
        (changed("steps", []), "plan.steps must be 1 with all before it in the plan, got 0"),
        (changed("steps", 0, "live", []), r"plan.steps\[0\].live must be 3"),
        (changed("dealt", "cores", 3), "plan.dealt.cores must be 10"),
        (changed("dealt", "makespan", 0), "plan.dealt.makespan must be"),
        (changed("predictions", []), "plan.predictions must be "),
        (changed("predictions", 6, "seconds", float("nan")), r"seconds must be finite and not negative, got nan"),
        (changed("predictions", 6, "seconds", float("inf")), r"seconds must be finite and not negative, got inf"),
        (changed("predictions", 6, "seconds", -1.0), r"predictions\[6\].seconds must be finite and not negative"),
        (changed("predictions", 6, "seconds", 0.0), r"predictions\[6\]: seconds must be positive, got 0.0"),
    ],
)
def test_json_that_is_no_plan(change, message):
    op, name, call = CASES["gdn"]
    record = json.loads(plan(op, name, **call).to_json())
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(change(record)))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "1" * 5000])
def test_text_that_is_no_json(text):
    with pytest.raises(ValueError, match=rf"plan must be a JSON object, got '{re.escape(text[:40])}'"):
        Plan.from_json(text)


# Kernels


def test_kernel_plans_are_only_for_what_kernels_run():
    for op, name, why in (
        ("gdn", "310P", "triton-ascend has no 310P target"),
        ("gla", "910B3", "there is no kernel for gla"),
        ("kda", "950", "do not fit on A5"),
    ):
        with pytest.raises(ValueError, match=why):
            plan(op, name, heads=4, seq=100).to_kernel_config()
    wide = plan("gdn", "910B3", heads=4, seq=100, K=272, V=16)
    with pytest.raises(ValueError, match="head dimensions go up to 256, not K=272") as caught:
        wide.to_kernel_config()
    assert wide.remarks[0].removeprefix("no Triton kernel runs this: ") in str(caught.value)


def test_kernel_plans_have_what_launchers_take():
    made = plan("gdn", "910B3", heads=1, seq=65536)
    config, schedule, segments = made.to_kernel_config()
    assert config == made.config and schedule is made.deal().schedule
    assert segments is not None and sum(map(sum, segments)) == 65536
    assert replace(made, kernel=None) != made


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (("sub", "a", ("sub", "b", "c")), "a - (b - c)"),
        (("sub", ("sub", "a", "b"), "c"), "a - b - c"),
        (("mul", ("add", "a", "b"), "c"), "(a + b) * c"),
        (("add", ("mul", "a", "b"), ("t", ("mul", "c", "d"))), "a * b + (c * d)^T"),
        (("dot", ("t", "a"), ("dot", "b", "c")), "a^T @ (b @ c)"),
        (("exp", ("sub", ("last", "a"), "a")), "exp(last(a) - a)"),
    ],
)
def test_expressions_are_written_as_people_do(expr, text):
    assert written(expr) == text
