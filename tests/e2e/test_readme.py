"""The README's lines for transformers do what it says."""

import re
from pathlib import Path

import pytest
import torch

import fla_npu
from fla_npu.integrations.transformers import torch_path
from tests.e2e.models import build, words

README = Path(__file__).parents[2] / "README.md"


def lines() -> str:
    section = README.read_text(encoding="utf-8").split("## Drop-in for transformers\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return block


def test_they_are_five():
    assert sum(bool(line.strip()) for line in lines().splitlines()) == 5


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_they_run_a_checkpoint_on_this_package(name, tmp_path):
    build(name).save_pretrained(tmp_path)
    names = {"folder": tmp_path, "prompt": words(1, 1, 12)}
    exec(lines(), names)
    report = fla_npu.enable()
    steps = sum(count for called, count in report.calls.items() if called.startswith("fused_recurrent"))
    assert steps == 3 * (names["tokens"].shape[1] - 12 - 1) > 0
    assert sum(called.endswith("RMSNormGated") for called in report.calls) == 1
    fla_npu.disable()
    with torch_path():
        expected = names["model"].generate(names["prompt"], max_new_tokens=50)
    assert torch.equal(names["tokens"], expected)
