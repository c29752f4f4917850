"""Tuning: classes of calls, the search with a timer made up, results on disk, the shipped table, the buffer model."""

import json
import math
import multiprocessing
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.ops.common import tune
from fla_npu.ops.common.configs import Config
from fla_npu.planner.chips import CHIPS

KEY = tune.Key("chunk_gdn", "910B3", 128, 128, "exact", "many", "long")
CALL = {"heads": 32, "sequences": 1, "length": 4096, "cores": 20}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLA_NPU_CACHE", str(tmp_path))
    tune._chosen.cache_clear()
    yield tmp_path
    tune._chosen.cache_clear()


# Classes


@pytest.mark.parametrize(
    ("call", "load"),
    [((5, 1), "quarter"), ((6, 1), "half"), ((10, 1), "half"), ((11, 1), "one"), ((20, 1), "one"), ((21, 1), "some"),
     ((20, 4), "some"), ((27, 3), "many")],
)  # fmt: skip
def test_load_is_units_per_core(call, load):
    heads, sequences = call
    key = tune.key_for(
        "chunk_gdn", "910B3", 128, 128, "bf16", False, **{**CALL, "heads": heads, "sequences": sequences}
    )
    assert key.load == load


def test_two_blocks_of_columns_are_two_units():
    wide = tune.key_for("chunk_gdn", "910B3", 128, 256, "bf16", False, **{**CALL, "heads": 20})
    assert (wide.load, wide.V) == ("some", 128)


@given(
    st.sampled_from(tune.OPS), st.sampled_from(sorted(CHIPS)), st.integers(1, 256), st.integers(1, 256),
    st.sampled_from(("fp16", "bf16", "fp32")), st.booleans(), st.integers(1, 100), st.integers(1, 50),
    st.integers(0, 10**6), st.integers(1, 36),
)  # fmt: skip
def test_every_call_has_a_configuration_that_fits_it(op, chip, K, V, dtype, fast, heads, sequences, length, cores):
    config = tune.config_for(op, chip, K, V, dtype, fast, heads=heads, sequences=sequences, length=length, cores=cores)
    assert config.chunk in tune.CHUNKS and config.width in tune.WIDTHS
    assert config.width <= max(32, 1 << (V - 1).bit_length())
    assert config.tile == 0 or config.tile < config.width
    if length <= 16:
        assert config.chunk < 64, "a chunk of mostly padding"


@pytest.mark.parametrize(
    ("change", "message"),
    [({"op": "chunk_gla"}, "op must be"), ({"K": 257}, "K must be"), ({"V": 0}, "V must be"),
     ({"dtype": "fp8"}, "dtype must be"), ({"cores": 0}, "cores must be"), ({"chip": "910X"}, "chip must be")],
)  # fmt: skip
def test_bad_arguments(change, message):
    arguments = {"op": "chunk_gdn", "chip": "910B3", "K": 128, "V": 128, "dtype": "bf16", "fast": False, **CALL}
    with pytest.raises(ValueError, match=message):
        tune.config_for(**{**arguments, **change})


# The search


def seconds(config: Config) -> float:
    """A machine on which 32 tokens, 64 columns and `unit_flag` are best."""
    cost = 1.0 + 0.3 * abs(math.log2(config.chunk / 32)) + 0.2 * abs(math.log2(config.width / 64))
    return cost * (0.9 if config.unit_flag else 1.1 if not config.multibuffer else 1.0)


def test_search_finds_the_best_size_and_option():
    result = tune.search(KEY, seconds)
    assert result.config == Config(chunk=32, width=64, unit_flag=True)
    assert result.seconds == pytest.approx(0.9)
    assert {config for config, _ in result.measured} >= set(tune.sizes(KEY)) - {
        config for config in tune.sizes(KEY) if not tune.fits(KEY, config)
    }


def test_search_survives_failures():
    def measure(config):
        if config.chunk == 32 or config.unit_flag:
            raise tune.Failed("does not compile")
        return seconds(config)

    result = tune.search(KEY, measure)
    assert result.config.chunk != 32 and not result.config.unit_flag
    failed = {config for config, time in result.measured if time == math.inf}
    assert {config.chunk for config in failed} >= {32}


def test_search_without_anything_to_measure():
    def measure(config):
        raise tune.Failed("no")

    with pytest.raises(ValueError, match="no configuration could be measured"):
        tune.search(KEY, measure)


def test_an_error_that_is_no_failure_ends_the_search():
    def measure(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tune.search(KEY, measure)


def test_rounds_are_interleaved_and_their_median_counts():
    calls = []
    noise = {Config(chunk=16): [1.0, 9.0, 1.2], Config(chunk=32): [1.1, 1.0, 1.0], Config(chunk=64): [3.0]}

    def measure(config):
        calls.append(config.chunk)
        return noise[config][Counter(calls)[config.chunk] - 1]

    medians = tune.race([Config(chunk=16), Config(chunk=32), Config(chunk=64), Config(chunk=16)], measure, 3)
    # 64 takes more than twice the best time in the first round.
    assert calls == [16, 32, 64, 16, 32, 16, 32]
    assert medians == {Config(chunk=16): 1.2, Config(chunk=32): 1.0, Config(chunk=64): 3.0}


def test_options_win_only_side_by_side():
    """The machine slows down after the sizes were measured, then is as before: options look worse or better than they
    are, and the last race decides."""
    count = 0

    def measure(config):
        nonlocal count
        count += 1
        fast_phase = 9 * 5 < count <= 9 * 5 + 2 * len(tune.OPTIONS) * 5
        return (0.5 if fast_phase else 1.0) * (1.2 if config.unit_flag or not config.multibuffer else 1.0) + (
            0.0 if config.set_workspace_multibuffer is None else 0.1
        ) + (0.1 if config.limit_auto_multi_buffer_only_for_local_buffer else 0.0) + config.chunk * 1e-4  # fmt: skip

    assert tune.search(KEY, measure).config in tune.sizes(KEY)


@pytest.mark.parametrize("load", tune.LOADS)
def test_sizes_are_allowed_and_distinct(load):
    for V in tune.WIDTHS:
        found = tune.sizes(KEY._replace(load=load, V=V))
        assert len(set(found)) == len(found) > 0
        assert all(config == config.fit(V) for config in found)
        assert any(config.tile for config in found) == (load in ("one", "some") and V > 32)


# Results on disk


def result(config: Config) -> tune.Result:
    return tune.Result(config, 1e-3, ((config, 1e-3), (Config(chunk=16), math.inf)), 2)


def test_a_result_is_found_again(empty_cache):
    config = Config(chunk=32, width=64, unit_flag=True)
    assert tune.load(KEY) is None
    path = tune.store(KEY, result(config))
    assert tune.load(KEY) == config
    assert tune.load(KEY._replace(load="one")) is None
    assert path.is_relative_to(empty_cache) and list(path.parent.iterdir()) == [path]
    assert json.loads(path.read_text())["measured"][1]["seconds"] is None


@pytest.mark.parametrize("what", ["source_hash", "compiler_version"])
def test_a_result_of_another_kernel_or_compiler_is_not_used(what, monkeypatch):
    tune.store(KEY, result(Config(chunk=16)))
    monkeypatch.setattr(tune, what, lambda: "another")
    assert tune.load(KEY) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": {"chunk": 16, "depth": 3}}', '{"config": 1}'])
def test_a_damaged_file_counts_as_none(text):
    tune.store(KEY, result(Config())).write_text(text)
    assert tune.load(KEY) is None


def test_the_source_counts(monkeypatch):
    before = tune.source_hash()
    monkeypatch.setattr(tune, "_SOURCES", ("chunk_kernel.py",))
    assert tune.source_hash.__wrapped__() != before == tune.source_hash()


def write_often(key: tune.Key, width: int) -> None:
    for _ in range(50):
        tune.store(key, result(Config(width=width)))


def test_processes_write_at_once(empty_cache):
    context = multiprocessing.get_context("fork")
    keys = (KEY, KEY, KEY._replace(op="chunk_kda"))
    processes = [context.Process(target=write_often, args=job) for job in zip(keys, (32, 64, 128), strict=True)]
    for process in processes:
        process.start()
    seen = set()
    while any(process.is_alive() for process in processes):
        if tune.path_of(KEY).exists():
            json.loads(tune.path_of(KEY).read_text())
            seen.add(tune.load(KEY))
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert seen <= {Config(width=32), Config(width=64)} and tune.load(KEY) in (Config(width=32), Config(width=64))
    assert tune.load(keys[2]) == Config(width=128)
    assert len(list(tune.path_of(KEY).parent.iterdir())) == 2


# What the launcher gets


def chosen() -> Config:
    return tune.config_for("chunk_gdn", "910B3", 128, 128, "bf16", False, **{**CALL, "heads": 320})


def test_stored_results_come_first_unless_switched_off(monkeypatch):
    shipped = chosen()
    tuned = replace(shipped, unit_flag=True)
    tune.store(KEY, result(tuned))
    assert chosen() == tuned
    monkeypatch.setenv("FLA_NPU_TUNE", "0")
    assert chosen() == shipped


def test_tuning_on_first_use_is_asked_for(monkeypatch):
    shipped = chosen()
    calls = []
    monkeypatch.setattr(
        tune, "_timer", lambda key, dtype, cores: lambda config: calls.append(config) or seconds(config)
    )
    assert chosen() == shipped and not calls
    monkeypatch.setenv("FLA_NPU_TUNE", "1")
    assert chosen() == Config(chunk=32, width=64, unit_flag=True)
    measured = len(calls)
    assert measured > 0
    tune._chosen.cache_clear()
    assert chosen() == Config(chunk=32, width=64, unit_flag=True) and len(calls) == measured


def test_tuning_without_a_device_is_the_shipped_choice(monkeypatch):
    shipped = chosen()
    monkeypatch.setenv("FLA_NPU_TUNE", "1")
    assert chosen() == shipped


def test_a_word_that_is_no_setting(monkeypatch):
    monkeypatch.setenv("FLA_NPU_TUNE", "maybe")
    with pytest.raises(ValueError, match="FLA_NPU_TUNE must be"):
        chosen()


def test_decays_without_a_bound_run_the_default():
    assert tune.config_for("chunk_kda", "910B3", 128, 128, "bf16", False, **{**CALL, "heads": 1}, bounded=False) == (
        tune.default("chunk_kda", "910B3", 128, 128, "bf16", False)
    )
    assert tune.default("chunk_kda", "910B3", 128, 128, "bf16", False) == tune.shipped(KEY._replace(op="chunk_kda"))


def test_a_call_reads_no_file_twice(monkeypatch):
    chosen()
    monkeypatch.setattr(tune, "load", lambda key: pytest.fail("looked on disk again"))
    chosen()


# The shipped table and the buffer model, against what was compiled

COMPILED = Path(__file__).parents[2] / "benchmarks" / "results" / "sweep" / "compiled.json"


def rows(chip: str = "910B3") -> list[dict]:
    return [row for row in json.loads(COMPILED.read_text())["rows"] if row["chip"] == chip]


def key_of(row: dict) -> tune.Key:
    return KEY._replace(op=row["op"], K=row["K"], V=min(row["V"], 128), precision=row["precision"])


def test_every_class_ships():
    for chip, op, K, V, precision, load, length in product(
        ("910B3", "910B1", "910_9382", "950"), tune.OPS, (64, 128, 256), tune.WIDTHS, tune.PRECISIONS, tune.LOADS,
        tune.LENGTHS,
    ):  # fmt: skip
        key = tune.Key(op, chip, K, V, precision, load, length)
        assert tune.shipped(key) == tune.shipped(key).fit(V)


def test_what_ships_on_a2_compiles_without_a_fault():
    """Rows of the same sizes in the committed table; there is none of a K that does not fit at all."""
    table = {(row["op"], row["precision"], row["K"], Config(**row["config"])): row for row in rows()}
    checked = 0
    for op, precision, K, load, length in product(tune.OPS, ("exact", "fast"), (64, 128), tune.LOADS, tune.LENGTHS):
        config = tune.shipped(tune.Key(op, "910B3", K, K, precision, load, length))
        row = table.get((op, precision, K, config))
        if row is not None:
            assert row["ok"], row["problems"]
            checked += 1
    assert checked >= 40


def test_the_model_discards_nothing_that_compiles_and_most_that_does_not():
    overflowed = discarded = 0
    for row in rows():
        fits = tune.fits(key_of(row), Config(**row["config"]))
        if row["verdict"] == "passed":
            assert fits, row
        elif row["verdict"] == "overflow":
            overflowed += 1
            discarded += not fits
    assert overflowed >= 3 and discarded >= 0.75 * overflowed


def test_the_model_grows_with_every_size():
    for op, K, chunk, width in product(tune.OPS, (64, 128), (16, 32), (32, 64)):
        key = KEY._replace(op=op, K=K)
        small = tune.estimate(key, Config(chunk=chunk, width=width))
        for larger in (
            tune.estimate(key, Config(chunk=2 * chunk, width=width)),
            tune.estimate(key, Config(chunk=chunk, width=2 * width)),
            tune.estimate(key._replace(K=2 * K), Config(chunk=chunk, width=width)),
        ):
            assert all(small[memory] <= larger[memory] for memory in small)
        assert set(small) == {"UB", "L1", "L0C"}


def test_a_cache_that_cannot_be_written_loses_nothing_but_the_file(monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(tune, "store", refuse)
    key = tune.key_for("chunk_gdn", "910B3", 64, 64, "bf16", False, heads=8, sequences=1, length=4096, cores=20)
    found = tune.tune(key, lambda config: float(config.width))
    assert found is not None and "read-only" in caplog.text
