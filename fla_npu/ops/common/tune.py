"""Which configuration the chunk kernel runs with: what tuning found on this machine, else what ships. No torch here.

    config_for(op, chip, K, V, dtype, fast, heads=.., sequences=.., length=.., cores=..)      # the launcher's question
    tune(key, measure)                                                                        # the search, any timer

`docs/tuning.md` explains the classes, the model that discards configurations unseen, and where the shipped table is
from.
"""

import ast
import hashlib
import json
import logging
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import metadata, resources
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from fla_npu import settings
from fla_npu.ops.common.configs import Config, tile_size
from fla_npu.planner.chips import chip as find_chip

logger = logging.getLogger(__name__)

OPS = ("chunk_gdn", "chunk_kda")
PRECISIONS = ("exact", "fast", "fp32")
CHUNKS = (16, 32, 64)
WIDTHS = (32, 64, 128)

LOADS = {"quarter": 0.25, "half": 0.5, "one": 1.0, "some": 4.0, "many": math.inf}
"""Classes of work by the units (sequence, head, block of 128 columns) per core, each up to its number. Up to one, fewer
columns at a time put more cores to work; up to four, tiles may even out the last round; beyond, neither matters."""

LENGTHS = {"16": 16, "32": 32, "long": math.inf}
"""Classes by tokens per sequence, each up to its number: where a chunk would be mostly padding."""

FAMILIES = {"A3": "A2"}
"""Chip family -> whose configurations it takes instead of its own: A3 has the cores and memories of A2."""


class Key(NamedTuple):
    """What a configuration is chosen for: classes, not sizes, so that few results serve every call."""

    op: str
    chip: str
    K: int
    """64, 128 or 256: what key channels round up to."""
    V: int
    """32, 64 or 128: the columns that there are to take at once."""
    precision: str
    """`exact` or `fast` with 16-bit inputs, or `fp32`."""
    load: str
    length: str


def key_for(
    op: str,
    chip: str,
    K: int,
    V: int,
    dtype: str,
    fast: bool,
    *,
    heads: int,
    sequences: int,
    length: int,
    cores: int,
) -> Key:
    """The key of a call.

    Args:
        op: `chunk_gdn` or `chunk_kda`.
        chip: a chip of `planner.chips`, under any of its names.
        K, V: head dimensions, 1 to 256.
        dtype: of the inputs: `fp16`, `bf16` or `fp32`.
        fast: whether products take 16-bit operands. Says nothing for float32.
        heads: value heads.
        sequences, length: number of sequences and tokens of each, the mean where they differ.
        cores: programs of the launch.

    Raises:
        ValueError: an argument is not among those named here.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if dtype not in ("fp16", "bf16", "fp32"):
        raise ValueError(f"dtype must be fp16, bf16 or fp32, got {dtype!r}")
    for name, size in (("K", K), ("V", V)):
        if not 1 <= size <= 256:
            raise ValueError(f"{name} must be between 1 and 256, got {size}")
    if cores < 1:
        raise ValueError(f"cores must be positive, got {cores}")
    width = min(max(tile_size(V), WIDTHS[0]), WIDTHS[-1])
    units = heads * sequences * -(-V // WIDTHS[-1])
    precision = "fp32" if dtype == "fp32" else "fast" if fast else "exact"
    load = next(name for name, most in LOADS.items() if units <= most * cores)
    tokens = next(name for name, most in LENGTHS.items() if length <= most)
    return Key(op, find_chip(chip).name, max(tile_size(K), 64), width, precision, load, tokens)


def config_for(
    op: str,
    chip: str,
    K: int,
    V: int,
    dtype: str,
    fast: bool,
    *,
    heads: int,
    sequences: int,
    length: int,
    cores: int,
    bounded: bool = True,
) -> Config:
    """The configuration for a call. Arguments as those of `key_for`, and:

    Args:
        bounded: False for KDA whose log decays have no known bound: the kernel then holds two variants of a chunk, and
            only its default sizes are known to compile.

    The first call of a shape class reads a file; with `FLA_NPU_TUNE=1`, on an NPU and without a stored result, it tunes
    (a minute or more). Later calls look the answer up. Never waits for the device otherwise.
    """
    if not bounded:
        return default(op, chip, K, V, dtype, fast)
    key = key_for(op, chip, K, V, dtype, fast, heads=heads, sequences=sequences, length=length, cores=cores)
    return _chosen(key, cores, dtype, settings.tuning())


def default(op: str, chip: str, K: int, V: int, dtype: str, fast: bool) -> Config:
    """What ships for long sequences and many heads. Arguments as those of `key_for`."""
    many = key_for(op, chip, K, V, dtype, fast, heads=8, sequences=1, length=2**20, cores=1)
    return shipped(many)


@lru_cache(maxsize=4096)
def _chosen(key: Key, cores: int, dtype: str, tuning: str) -> Config:
    if tuning == "off":
        return shipped(key)
    stored = load(key)
    if stored is not None:
        return stored
    measure = _timer(key, dtype, cores) if tuning == "on" else None
    return shipped(key) if measure is None else tune(key, measure)


def _timer(key: Key, dtype: str, cores: int) -> Callable[[Config], float] | None:
    """What measures configurations here; None where nothing can."""
    if find_spec("triton") is None:
        return None
    from fla_npu.ops.common import device_timer

    return device_timer.for_key(key, dtype, cores)


# The shipped table


def shipped(key: Key) -> Config:
    """The configuration that ships for a key. Families without rows of their own have those of A2."""
    family = find_chip(key.chip).family
    place = (key.op, key.precision, key.K, key.V, key.load, key.length)
    table = _table()
    own, other = (FAMILIES.get(family, family), *place), ("A2", *place)
    return table[own if own in table else other]


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files("fla_npu.ops.common").joinpath("defaults.json").read_text())
    return found


def _models() -> dict[str, Any]:
    found: dict[str, Any] = _defaults()["buffers"]
    return found


@lru_cache(maxsize=1)
def _table() -> Mapping[tuple[str, str, str, int, int, str, str], Config]:
    found = {}
    for row in _defaults()["rows"]:
        for load, length in product(LOADS, LENGTHS):
            place = (row["family"], row["op"], row["precision"], row["K"], row["V"], load, length)
            found[place] = Config(**row["other"].get(f"{load} {length}", row["config"]))
    return found


# The search


def sizes(key: Key) -> tuple[Config, ...]:
    """The chunk and tile sizes to try for a key, with the compiler's default options."""
    found = []
    for chunk in CHUNKS:
        for width in WIDTHS:
            if width > key.V:
                continue
            # A tile is the second walk of a program: worth its size only where there is a last round to share.
            tiles = [tile for tile in WIDTHS if tile < width] if key.load in ("one", "some") else []
            found += [Config(chunk=chunk, width=width, tile=tile) for tile in (0, *tiles)]
    return tuple(found)


OPTIONS: tuple[dict[str, Any], ...] = (
    {"unit_flag": True},
    {"multibuffer": False},
    {"limit_auto_multi_buffer_only_for_local_buffer": True},
)
"""Compiler options to try on the best sizes, one at a time. `set_workspace_multibuffer` is not among them: the chunk
loop carries the state, so the compiler does not pipeline it, and the programs are the same with it."""


def variants(config: Config) -> tuple[Config, ...]:
    """The configuration with each of `OPTIONS`."""
    return tuple(replace(config, **options) for options in OPTIONS)


def features(K: int, config: Config) -> tuple[float, ...]:
    """What the use of an on-core memory grows with: bytes of the kernel's tiles in float32, by their shapes."""
    C, W = config.chunk, config.width
    # Keys wider than 128 are two halves, one after the other; only the state is there as a whole.
    half = min(K, 128)
    return (4 * C * C, 4 * C * half, 4 * C * W, 4 * K * W, 4 * half * half, 4 * half)


def estimate(key: Key, config: Config) -> dict[str, float]:
    """Use of each on-core memory that the model expects, as a share of what is usable; above 1 it does not fit.

    Fitted to compiled programs (`benchmarks/sweep.py`, `docs/tuning.md`). A margin above the largest estimate among
    those that compiled keeps it from discarding what would fit.
    """
    found = find_chip(key.chip)
    limits = {"UB": found.ub_bytes, "L1": found.l1_bytes, "L0C": found.l0c_bytes}
    x = features(key.K, config)
    shares = {}
    for memory, model in _models().get(key.op, {}).items():
        limit = limits[memory]
        if limit is not None:
            shares[memory] = sum(a * b for a, b in zip(model["coefficients"], x, strict=True)) / limit / model["margin"]
    return shares


def fits(key: Key, config: Config) -> bool:
    """Whether the model lets a configuration be tried."""
    return all(share <= 1 for share in estimate(key, config).values())


class Failed(Exception):
    """A configuration that cannot be measured: it does not compile, or computes something else."""


@dataclass(frozen=True)
class Result:
    """What a search found."""

    config: Config
    seconds: float
    measured: tuple[tuple[Config, float], ...]
    """Medians of everything that was measured; infinity where it failed."""
    discarded: int
    """Configurations that the buffer model discarded unseen."""


def search(key: Key, measure: Callable[[Config], float], *, rounds: int = 5, finalists: int = 2) -> Result:
    """Looks for the fastest configuration: first sizes, then compiler options on the best of them.

    Args:
        key: what for.
        measure: seconds of one call with a configuration, compiled at its first call; raises `Failed` where it cannot.
        rounds: measurements of a configuration, interleaved with those of the others; their median counts.
        finalists: sizes that the options are tried on.

    Raises:
        ValueError: no configuration could be measured.
    """
    tried = sizes(key)
    fitting = [config for config in tried if fits(key, config)]
    medians = race(fitting, measure, rounds)
    best = sorted((c for c in medians if medians[c] < math.inf), key=lambda config: medians[config])[:finalists]
    medians |= race([variant for config in best for variant in variants(config)], measure, rounds)
    winner = min(medians, key=lambda config: medians[config], default=None)
    if winner is None or medians[winner] == math.inf:
        raise ValueError(f"no configuration could be measured for {key}")
    if winner not in best:
        # Options were measured later than sizes: the winner must also win side by side.
        final = race([*best, winner], measure, rounds)
        winner = min(final, key=lambda config: final[config])
        medians |= final
    return Result(winner, medians[winner], tuple(medians.items()), len(tried) - len(fitting))


def race(configs: Iterable[Config], measure: Callable[[Config], float], rounds: int) -> dict[Config, float]:
    """Median seconds of each configuration over interleaved rounds. One that takes over twice the best time in the
    first round is not measured again."""
    samples: dict[Config, list[float]] = {}
    medians: dict[Config, float] = {}
    for config in dict.fromkeys(configs):
        try:
            samples[config] = [measure(config)]
        except Failed:
            medians[config] = math.inf
    best = min((times[0] for times in samples.values()), default=math.inf)
    close = [config for config, times in samples.items() if times[0] <= 2 * best]
    for _ in range(rounds - 1):
        for config in close:
            samples[config].append(measure(config))
    return medians | {config: statistics.median(times) for config, times in samples.items()}


def tune(key: Key, measure: Callable[[Config], float], *, rounds: int = 5) -> Config:
    """Searches, stores the result on disk and returns it. Arguments as those of `search`."""
    result = search(key, measure, rounds=rounds)
    try:
        store(key, result)
    except OSError as error:
        # What was found serves this process; a cache that cannot be written must not fail the op that asked.
        logger.warning("the tuned configuration of %s is not kept: %s", key, error)
    return result.config


# Results on disk: a file per key, so that processes that tune at the same time cannot lose each other's results

_FORMAT = 1
_SOURCES = ("chunk_kernel.py", "tiles.py")


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Of the kernel's code, comments and docstrings left out: a result for another kernel says nothing."""
    folder = resources.files("fla_npu.ops.common")
    dumps = []
    for name in _SOURCES:
        tree = ast.parse(folder.joinpath(name).read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [x for x in body if not _is_text(x)]  # type: ignore[attr-defined]
        dumps.append(ast.dump(tree))
    return hashlib.sha256("\0".join(dumps).encode()).hexdigest()[:16]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """What compiles kernels here: packages by version, and the vendor's compiler by path and size, which costs no
    process."""
    parts = []
    for package in ("triton-ascend", "torch_npu"):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    binary = shutil.which("bishengir-compile")
    if binary is not None:
        path = Path(binary).resolve()
        parts.append(f"{path} {path.stat().st_size}")
    return ", ".join(parts)


def path_of(key: Key) -> Path:
    """The file of a key, for this kernel and compiler."""
    name = json.dumps([_FORMAT, *key, source_hash(), compiler_version()])
    return settings.cache_dir() / "tune" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def load(key: Key) -> Config | None:
    """The stored result, None when there is none or its file is damaged."""
    try:
        record = json.loads(path_of(key).read_text())
        return Config(**record["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(key: Key, result: Result) -> Path:
    """Keeps a result. Readers see the old file or the new one, never half of one."""
    record = {
        "key": key._asdict(),
        "config": asdict(result.config),
        "seconds": result.seconds,
        "measured": [
            {"config": asdict(config), "seconds": seconds if seconds < math.inf else None}
            for config, seconds in result.measured
        ],
        "source": source_hash(),
        "compiler": compiler_version(),
    }
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(record, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _chosen.cache_clear()
    return path
