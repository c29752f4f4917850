"""Rows of results: one per case, implementation and number of threads, whatever became of it."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.registry import Case, case_macs

OK = "ok"
SKIPPED = "skipped"
MISSING = "missing"
WRONG = "wrong"
FAILED = "failed"
CRASHED = "crashed"


@dataclass(frozen=True)
class Limits:
    """When not to start a call, and when to stop repeating it."""

    seconds: float = 25.0
    """Skip an implementation in a case when a smaller case predicts a longer call."""
    gigabytes: float = 12.0
    """The same for the memory beyond inputs and results."""
    budget: float = 2.0
    """Seconds that the samples of one implementation in one case may take, but see `min_samples`."""
    rounds: int = 9
    min_samples: int = 2
    once: float = 8.0
    """A call of so many seconds is not repeated."""


_FOLDERS = re.compile(r"(?<![\w/])/(?:[\w.+-]+/)+")


def row(case: Case, implementation: str, threads: int, status: str, reason: str = "", **values) -> dict:
    """Messages of a failure may name files: the folders of this machine are nobody's business."""
    return {
        **case.record(),
        "implementation": implementation,
        "threads": threads,
        "status": status,
        "reason": _FOLDERS.sub("", reason),
        **values,
    }


def timed(samples: list[float]) -> dict:
    """Statistics of the samples. Spread is the range over the median."""
    median = statistics.median(samples)
    return {
        "median_s": median,
        "min_s": min(samples),
        "max_s": max(samples),
        "spread": (max(samples) - min(samples)) / median,
        "samples": len(samples),
    }


def gemm_rate(record: dict) -> float:
    """GFLOP/s of a row, counting the multiply-accumulates of the chunked algorithm whoever ran it."""
    return 2 * case_macs(case_of(record)) / record["median_s"] / 1e9


def case_of(record: dict) -> Case:
    return Case(**{field.name: record[field.name] for field in fields(Case)})


def identity(record: dict) -> tuple:
    return case_of(record), record["implementation"], record["threads"]


def predict(case: Case, implementation: str, done: list[dict], limits: Limits) -> str | None:
    """Why not to start, judged by the largest smaller case of the same op and mode that was measured; None to go on."""
    measured = [
        (case_of(record).work, record)
        for record in done
        if record["implementation"] == implementation
        and (record["op"], record["mode"], record["status"]) == (case.op, case.mode, OK)
        and case_of(record).work < case.work
    ]
    if not measured:
        return None
    work, record = max(measured, key=lambda pair: pair[0])
    smaller = case_of(record)
    seconds = record["median_s"] * case.work / work
    gigabytes = record["extra_bytes"] / 1e9 * case.elements / smaller.elements
    if seconds > limits.seconds:
        return f"{seconds:.0f} s per call predicted from '{smaller.key}', limit {limits.seconds:g} s"
    if gigabytes > limits.gigabytes:
        return f"{gigabytes:.0f} GB predicted from '{smaller.key}', limit {limits.gigabytes:g} GB"
    return None


def load(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}


def save(path: Path, runs: list[dict], records: list[dict]) -> None:
    """Write to a neighbour first, so that an interruption leaves the previous file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    lines = ",\n".join(f"  {json.dumps(record)}" for record in records)
    partial.write_text(f'{{\n"runs": {json.dumps(runs, indent=1)},\n"rows": [\n{lines}\n]\n}}\n')
    partial.replace(path)
