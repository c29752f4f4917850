"""Language models on two processes against one; sharded loading by transformers."""

import importlib.util
from pathlib import Path

import pytest

from tests.distributed.processes import run_cases

pytest.importorskip("transformers.distributed.tensor_parallel", reason="needs transformers with plans on DTensors")

from tests.distributed import model_cases


def test_models_on_two_processes(tmp_path: Path):
    cases = list(model_cases.CASES)
    if importlib.util.find_spec("accelerate"):
        # transformers asks for it before it loads onto several devices.
        cases.append(model_cases.from_pretrained)
    reports = run_cases(model_cases.__name__, [case.__name__ for case in cases], tmp_path, timeout=300)
    assert not reports, "\n".join(reports)
