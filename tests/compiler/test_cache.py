"""Results on disk: whole or absent, whatever happens to the file and whoever writes it."""

import multiprocessing
import os
from pathlib import Path

import pytest

from fla_npu.compiler import cache
from fla_npu.compiler.bishengir import Outcome

OUTCOME = Outcome("overflow", (("UB", 2_000_000, 1_572_864),), False, True, "too much", "a log", "")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("FLA_NPU_CACHE", str(tmp_path))
    return tmp_path


def files(directory):
    return [path for path in directory.rglob("*") if path.is_file()]


def test_there_and_back(directory):
    assert cache.load("name") is None
    cache.store("name", OUTCOME)
    assert cache.load("name") == OUTCOME
    assert [path.name for path in files(directory)] == ["name.json.gz"]


@pytest.mark.parametrize("damage", [b"", b"no gzip", None])
def test_damaged_files_are_as_if_absent(directory, damage):
    cache.store("name", OUTCOME)
    (path,) = files(directory)
    path.write_bytes(path.read_bytes()[:-9] if damage is None else damage)
    assert cache.load("name") is None
    cache.store("name", OUTCOME)
    assert cache.load("name") == OUTCOME


def test_timeouts_are_not_kept(directory):
    cache.store("name", Outcome("timeout", (), False, False, "no result", "", ""))
    assert files(directory) == []


def test_every_part_of_the_input_counts():
    base = ("ttir", "linalg", "binary", "target", ("a", "b"), "1")
    keys = {cache.key(*base)}
    for position, other in enumerate(("x", "x", "x", "x", ("a",), "x")):
        keys.add(cache.key(*base[:position], other, *base[position + 1 :]))
    assert len(keys) == 7


def test_locations_count_in_triton_ir_only():
    """The front end picks among locations of Linalg operations by chance."""
    one = '#loc1 = loc("kernel.py":1:2)\n%0 = arith.constant 0.0 : f32 loc(#loc1)'
    other = '#loc7 = loc("kernel.py":9:2)\n%0 = arith.constant 0.0 : f32 loc(#loc7)'
    rest = ("binary", "target", (), "1")
    assert cache.key("", one, *rest) == cache.key("", other, *rest)
    assert cache.key(one, "", *rest) != cache.key(other, "", *rest)
    assert cache.key("", one, *rest) != cache.key("", one.replace("0.0", "1.0"), *rest)


def write_many(directory, count):
    os.environ["FLA_NPU_CACHE"] = directory
    for number in range(count):
        cache.store("name", Outcome("passed", (), False, False, "", "", f"module {number} " * 20_000))


def test_readers_never_see_half_a_result(directory):
    cache.store("name", OUTCOME)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(str(directory), 40)) for _ in range(2)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers):
        found = cache.load("name")
        assert found is not None
        assert found == OUTCOME or len(set(found.module.split("module "))) == 2
        reads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert reads > 10
    assert len(files(directory)) == 1


def test_default_directory(monkeypatch, tmp_path):
    from fla_npu import settings

    monkeypatch.delenv("FLA_NPU_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.cache_dir() == tmp_path / "fla_npu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings.cache_dir() == Path(tmp_path / "home/.cache/fla_npu")


def test_a_flipped_byte_is_no_error(directory):
    cache.store("name", OUTCOME)
    (path,) = files(directory)
    whole = path.read_bytes()
    missed = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        missed += cache.load("name") is None
    # The rest are bytes of gzip's header that say nothing of the content.
    assert missed > len(whole) - 10
