"""The sweep over sizes: its ranking, its table, its pictures, and that what ships comes from the committed rows."""

import json
import math
from importlib.util import find_spec

import pytest

from benchmarks import sweep
from fla_npu.ops.common import tune
from fla_npu.ops.common.configs import Config

CASE = sweep.Case("chunk_gdn", "910B3", "exact", "bf16", 128, 128, Config())
PER_TOKEN = {"sync": 0.25, "workspace": 6400.0, "user": 3200.0, "macs16": 8192.0, "macs32": 4096.0, "vector": 640.0}


def made(chunk: int = 64, width: int = 128, ok: bool = True, **changes) -> dict:
    """A row as the compiler makes it."""
    case = sweep.Case("chunk_gdn", "910B3", "exact", "bf16", 128, 128, Config(chunk=chunk, width=width))
    row = {
        **case.record(), "source": tune.source_hash(), "kind": "compiled", "verdict": "passed", "ok": ok,
        "problems": [],
        "needs": {}, "peak": {"UB": 100_000, "L1": 200_000, "L0C": 50_000}, "split": "held", "syncs": 18,
        "limit": {"UB": 196_608, "L1": 524_288, "L0C": 131_072}, "workspace": 1, "program": "x", "per_token": PER_TOKEN,
    }  # fmt: skip
    row |= changes
    row["cycles"] = sweep.cycles(row)
    return row


def scaled(factor: float, **sizes) -> dict:
    return made(**sizes, per_token={name: factor * value for name, value in PER_TOKEN.items()})


def test_cycles_add_up():
    # 0.25 * 900 + 6400 / 64 + 3200 / 32 + 8192 / 4096 + 4096 / 1024 + 640 / 64
    assert sweep.cycles(made()) == 225 + 100 + 100 + 2 + 4 + 10
    assert sweep.cycles(made(ok=False, problems=["fits only without multi-buffering"])) == math.inf
    assert sweep.cycles(made(per_token=None)) == math.inf


def test_an_order_that_no_weight_upsets_is_stable():
    assert sweep.stable([scaled(1.0), scaled(1.5, chunk=32)])
    fewer_syncs = made(chunk=32, per_token={**PER_TOKEN, "sync": 0.05, "workspace": 17000.0})
    assert sweep.cycles(fewer_syncs) < sweep.cycles(made())
    assert not sweep.stable([made(), fewer_syncs])


def table() -> dict[tuple[int, int], dict]:
    """What narrower units and shorter chunks cost per token, as a multiple."""
    widths, chunks = {128: 1.0, 64: 1.5, 32: 1.6}, {64: 1.0, 32: 1.4, 16: 2.2}
    return {
        (chunk, width): scaled(a * b, chunk=chunk, width=width)
        for width, a in widths.items()
        for chunk, b in chunks.items()
    }


ONE = 441.0


@pytest.mark.parametrize(
    ("config", "units", "length", "cycles"),
    [
        (Config(), 20, 64, 64 * ONE),
        (Config(), 21, 64, 64 * 2 * ONE),
        (Config(), 20, 65, 128 * ONE),
        (Config(width=64), 10, 64, 64 * 1.5 / 2 * ONE),
        (Config(width=64), 20, 64, 64 * 2 * 1.5 / 2 * ONE),
        (Config(chunk=16), 20, 16, 16 * 2.2 * ONE),
        # One round of whole heads, then 5 heads as 20 tiles of 32 columns.
        (Config(tile=32), 25, 64, 64 * (1 + 1.6 / 4) * ONE),
    ],
)
def test_prediction(config, units, length, cycles):
    assert sweep.predict(table(), "chunk_gdn", config, units, 128, length, 20) == pytest.approx(cycles)


def key(load: str, length: str) -> tune.Key:
    return tune.Key("chunk_gdn", "910B3", 128, 128, "exact", load, length)


@pytest.mark.parametrize(
    ("load", "length", "config"),
    [
        ("many", "long", Config()),
        ("half", "long", Config(width=64)),
        ("quarter", "long", Config(width=32)),
        ("some", "long", Config(tile=32)),
        ("many", "32", Config(chunk=32)),
        ("many", "16", Config(chunk=16)),
        ("quarter", "16", Config(chunk=16)),
    ],
)
def test_choice(load, length, config):
    assert sweep.choose(table(), key(load, length), 20, lambda key, config: True) == config


def test_choice_is_among_the_usable():
    assert sweep.choose(table(), key("many", "long"), 20, lambda key, config: config.chunk == 32) == Config(chunk=32)
    assert sweep.choose(table(), key("many", "long"), 20, lambda key, config: False) is None
    only = {(16, 32): table()[16, 32]}
    assert sweep.choose(only, key("many", "long"), 20, lambda key, config: True) == Config(chunk=16, width=32)


def test_small_gains_do_not_ship():
    rows = table()
    rows[64, 64] = scaled(1.8, width=64)
    rows[64, 32] = scaled(3.6, width=32)
    assert sweep.choose(rows, key("half", "long"), 20, lambda key, config: True) == Config()


def test_what_was_wrong_in_the_simulator_is_not_usable():
    row = {**CASE.record(), "source": tune.source_hash(), "right": False}
    usable = sweep.usable_by([row])
    assert not usable(key("many", "long"), Config()) and usable(key("many", "long"), Config(chunk=32))
    assert sweep.usable_by([{**row, "right": True}])(key("many", "long"), Config())


def test_grid_has_no_case_twice():
    cases = sweep.grid(("910B3", "950"))
    assert len(set(cases)) == len(cases)
    assert {case.K for case in cases if case.chip == "910B3"} == {64, 128, 256}
    assert all(case.config == case.config.fit(case.V) for case in cases)


def test_rows_come_back_and_those_of_another_source_are_stale(tmp_path):
    path = tmp_path / "rows.json"
    rows = sweep.Table(path, {"date": "now"})
    assert not rows.fresh(CASE)
    rows.add(CASE, {"ok": True})
    again = sweep.Table(path, {})
    assert again.fresh(CASE) and again.rows[CASE]["ok"]
    again.rows[CASE]["source"] = "old"
    again.save()
    assert not sweep.Table(path, {}).fresh(CASE)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.json"]


def test_sizes_are_taken_without_options():
    rows = [
        made(),
        {**made(), "config": {**made()["config"], "unit_flag": True}, "ok": False},
        {**made(), "dtype": "fp16"},
    ]
    assert sweep.sized(rows, "910B3", "chunk_gdn", "exact", 128) == {(64, 128): rows[0]}


def test_buffer_model_finds_the_tiles_behind_the_figures():
    """Rows whose UB is exactly two tiles `C K` and one of `K K`: the model must give these coefficients."""
    rows = []
    for K in (32, 64, 128):
        for chunk in (16, 32, 64):
            size = 4 * (2 * chunk * K + K * K)
            limit = 196_608
            full = size > limit
            row = made(chunk=chunk, peak={} if full else {"UB": size}, needs={"UB": size} if full else {})
            rows.append({**row, "K": K, "verdict": "overflow" if full else "passed"})
    model = sweep.buffer_model(rows)["chunk_gdn"]["UB"]
    assert model["coefficients"] == pytest.approx([0, 2, 0, 0, 1, 0], abs=1e-3)
    assert model["rms_error"] < 1e-3 and model["points"] == 9


def test_shipped_table_comes_from_the_committed_rows():
    rows = json.loads((sweep.OUT / "compiled.json").read_text())["rows"]
    trials = json.loads((sweep.OUT / "trials.json").read_text())["rows"]
    made_now = sweep.ship(rows, trials)
    shipped = json.loads(sweep.DEFAULTS.read_text())
    assert made_now["rows"] == shipped["rows"]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_pictures(tmp_path):
    rows = [*table().values()]
    rows[0] = {**rows[0], "ok": False, "verdict": "overflow", "needs": {"UB": 400_000}, "cycles": None}
    assert [path.name for path in sweep.draw(rows, tmp_path)] == ["chunk_gdn-exact.png"]
    assert (tmp_path / "chunk_gdn-exact.png").stat().st_size > 10_000
    assert sweep._words(rows[0]) == "UB 2.0x"
