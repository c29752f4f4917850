"""Tensor parallelism of two processes against one, forward, backward, decoding and checkpoints."""

from pathlib import Path

from tests.distributed import cases
from tests.distributed.processes import run_cases


def test_two_processes_are_one(tmp_path: Path):
    """One test, since under pytest-xdist every worker would start its own processes."""
    names = [case.__name__ for case in cases.CASES]
    reports = run_cases(cases.__name__, names, tmp_path, timeout=300)
    assert not reports, "\n".join(reports)
