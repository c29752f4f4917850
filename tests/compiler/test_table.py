"""The committed table of what ships: what it promises, and that a worse program would show. Compiles nothing."""

import copy
import json

import pytest

from fla_npu.compiler import table
from fla_npu.compiler.table import ideal_bytes
from fla_npu.planner.chips import chip

TABLE = table.load()
ROWS = TABLE["rows"]
ALIKE = ("910B3", "910B1", "910_9382")
"""Chips whose programs differ in nothing but the number of cores."""


def chunked(*, dtypes=("bf16", "fp16"), K=128, chips=ALIKE):
    """Rows of plain calls by chunks of 64."""
    endings = ("exact-C64-BV128", "fast-C64-BV128", "exact-C64-BV128-unbounded", "fast-C64-BV128-unbounded")
    names = {
        f"{op}-{dtype}-K{K}-V{K}-{end}" for op in ("chunk_gdn", "chunk_kda") for dtype in dtypes for end in endings
    }
    return [row for row in ROWS if row["name"] in names and row["chip"] in chips]


def test_rows_are_those_of_a_dated_compiler():
    keys = [(row["name"], row["chip"]) for row in ROWS]
    assert len(keys) == len(set(keys))
    assert all(row["compiler"].endswith(" 1.2.0") and row["date"] >= "2026-11-30" for row in ROWS)


def test_the_two_ops_are_there_in_both_precisions_and_dtypes():
    assert len(chunked(chips=["910B3"])) == 12


@pytest.mark.parametrize("chip", ALIKE)
def test_everything_compiles_for_a2_and_a3(chip):
    problems = {row["name"]: row["problems"] for row in ROWS if row["chip"] == chip and row["problems"]}
    assert problems == {}
    chunks = [row for row in ROWS if row["chip"] == chip and "chunk" in row]
    assert all(row["split"] == "held" and not row["retried"] and row["scalar_loops"] == 0 for row in chunks)


@pytest.mark.parametrize("row", chunked(), ids=lambda row: f"{row['name']}-{row['chip']}")
def test_goals_at_128(row):
    assert row["problems"] == [] and row["split"] == "held" and not row["retried"] and row["scalar_loops"] == 0
    assert row["chunk"]["syncs"] <= 20
    dtype = table.ITEM_BYTES["bf16"]
    chunk, C, K = row["chunk"], 64, 128
    # q, k and v are read once and o is written once.
    assert chunk["written_bytes"] == {"o": C * K * dtype}
    assert {name: chunk["read_bytes"][name] for name in "qkv"} == dict.fromkeys("qkv", C * K * dtype)


@pytest.mark.parametrize(
    "one",
    [(row["name"], one) for row in chunked(chips=["910B3"]) for one in row["launches"]],
    ids=lambda one: f"{one[0]}-{one[1]['heads']}x{one[1]['seq']}",
)
def test_traffic_of_whole_launches(one):
    """Gated DeltaNet moves the ideal within 2 %. What it reads twice are numbers per token: both vector cores of a
    program take all of the two parts of c and of beta, which is 12 + 4 of the 1032 bytes of a token more.

    KDA reads again the rows of c that are references of scores: with pieces of 16 rows 1 + 2 + 4 of 64, and the last
    row, that is 1/8 of the gates, which are a third of everything; and beta four times. 5 % bounds that.
    """
    name, launch = one
    assert launch["ideal_bytes"] == ideal_bytes(name.split("-")[0], launch["heads"], launch["seq"], 128, 128, "bf16")
    assert 1 <= launch["ratio"] <= (1.02 if name.startswith("chunk_gdn") else 1.05)


def test_ideal_is_that_of_the_paper():
    mib = [round(ideal_bytes(op, 10, 2048, 128, 128, "fp16") / 2**20, 3) for op in ("chunk_gdn", "chunk_kda")]
    assert mib == [21.406, 31.328]


def test_chips_of_one_architecture_have_one_program():
    by_name = {}
    for row in ROWS:
        if row["chip"] in ALIKE and row["verdict"] == "passed":
            by_name.setdefault(row["name"], []).append(table.figures(row))
    several = [found for found in by_name.values() if len(found) > 1]
    assert several
    assert all(one == found[0] for found in several for one in found)


def test_limits_are_those_of_the_chip_table():
    limited = [row for row in ROWS if row.get("limit_bytes")]
    assert {row["chip"] for row in limited} >= {*ALIKE, "950"}
    for row in limited:
        one = chip(row["chip"])
        assert row["limit_bytes"] == {"UB": one.ub_bytes, "L1": one.l1_bytes, "L0C": one.l0c_bytes}


@pytest.fixture
def row():
    return copy.deepcopy(table.by_key(TABLE)["chunk_gdn-bf16-K128-V128-exact-C64-BV128", "910B3"])


def test_equal_and_better_is_not_worse(row):
    assert table.worse(row, row) == []
    better = copy.deepcopy(row)
    better["chunk"]["syncs"] -= 1
    assert table.worse(better, row) == []


def test_every_figure_counts(row):
    names = set(table.figures(row))
    shown = set()
    for path in (
        ("peak_bytes", "UB"), ("peak_bytes", "L1"), ("peak_bytes", "L0C"), ("workspace_bytes",), ("scalar_loops",),
        ("chunk", "syncs"), ("chunk", "read_bytes", "q"), ("chunk", "written_bytes", "o"), ("chunk", "constant_bytes"),
        ("chunk", "workspace_bytes"), ("chunk", "l1_to_l0_bytes"), ("chunk", "macs", "f32"),
        ("chunk", "vector_elements"),
    ):  # fmt: skip
        new = copy.deepcopy(row)
        inner = new
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] += 1
        (message,) = table.worse(new, row)
        shown.add(message.split(":")[0])
    assert shown == names


def test_problems_and_missing_figures_count(row):
    lost = {**row, "problems": ["the split was lost"]}
    assert table.worse(lost, row) == ["new problem: the split was lost"]
    overflow = {"verdict": "overflow", "problems": ["UB overflow"]}
    assert table.worse(overflow, row) == ["new problem: UB overflow", "verdict overflow"]
    without = {name: value for name, value in row.items() if name != "chunk"}
    assert "no longer counted: hand-offs of a chunk" in table.worse(without, row)


def test_json_and_back():
    assert json.loads(table.dump(TABLE)) == TABLE


def test_the_document_is_that_of_the_table():
    from benchmarks import compiled

    assert (compiled.ROOT / "docs" / "compiled.md").read_text() == compiled.document(TABLE)
