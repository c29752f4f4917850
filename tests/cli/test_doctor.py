"""`fla-npu doctor` in process, and the command as a module."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fla_npu import __version__
from fla_npu.cli import doctor
from fla_npu.cli.main import main
from fla_npu.ops.dispatch import OPS
from fla_npu.planner.chips import CHIPS
from tests.npu import forget_choices, pretend_npus, pretend_triton


def test_json_tells_versions_choices_and_what_an_npu_needs():
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    findings = json.loads(result.stdout)
    assert findings["installed"]["fla_npu"] == __version__
    assert findings["installed"]["torch"]
    assert set(findings["installed"]) >= {"transformers", "triton", "triton-ascend", "torch_npu", "ascendnpu-ir", "fla"}
    assert set(findings["ops"]) == set(OPS)
    for choice in findings["ops"].values():
        assert choice["implementation"]
        assert choice["reason"]
    assert "not been run on an Ascend device" in findings["note"]
    assert [device["device"] for device in findings["devices"]] == ["cpu"]
    assert findings["devices"][0]["ops"] == findings["ops"]
    assert findings["precision"] == "exact"


def test_tells_what_every_npu_would_run():
    groups = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)["on_npus"]
    by_chip = {chip: group["ops"] for group in groups for chip in group["chips"]}
    assert set(by_chip) == set(CHIPS)
    for name, ops in by_chip.items():
        assert set(ops) == set(OPS)
        if not CHIPS[name].triton:
            assert all(choice["reason"].endswith(CHIPS[name].no_triton_reason) for choice in ops.values())


def test_tells_what_the_npus_here_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with monkeypatch.context() as patch:
        pretend_npus(patch, "Ascend910B3", "Ascend310P3")
        pretend_triton(patch, tmp_path)
        result = CliRunner().invoke(main, ["doctor"])
        findings = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    forget_choices()
    assert findings["device"] == "npu"
    chosen = {
        device["device"]: {choice["implementation"] for choice in device["ops"].values()}
        for device in findings["devices"]
    }
    assert chosen == {"npu:0": {"triton"}, "npu:1": {"eager"}, "cpu": {"eager"}}
    for line in (
        "ops on npu:0 (Ascend910B3)",
        "  every op                  triton    the persistent Triton kernels run",
    ):
        assert line in result.stdout


def test_requests_that_cannot_be_honoured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("FLA_NPU_IMPL", "triton")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "  every op                  -         implementation 'triton' cannot run on cpu: " in result.stdout
    monkeypatch.setenv("FLA_NPU_PRECISION", "half")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code != 0 and "FLA_NPU_PRECISION must be exact or fast, got 'half'" in result.output
    monkeypatch.setenv("FLA_NPU_IMPL", "cuda")
    monkeypatch.delenv("FLA_NPU_PRECISION")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code != 0 and "no implementation 'cuda'" in result.output


def test_text_tells_of_ops_and_the_note():
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "ops on cpu\n  every op" in result.stdout
    assert doctor.NO_DEVICE_USED in result.stdout


@pytest.mark.parametrize(
    ("installed", "device", "expected"),
    [
        ({}, "cpu", ["torch_npu", "triton-ascend"]),
        ({"torch_npu": "2.7"}, "cpu", ["an Ascend device", "triton-ascend"]),
        ({"torch_npu": "2.7", "triton-ascend": "3.2", "triton": "3.2"}, "npu", ["remove triton"]),
        ({"torch_npu": "2.7", "triton-ascend": "3.2"}, "npu", []),
    ],
)
def test_missing_for_an_npu(installed, device, expected):
    versions = dict.fromkeys(doctor.PACKAGES) | installed
    missing = doctor._missing_for_npu(versions, device)
    assert len(missing) == len(expected)
    for line, start in zip(missing, expected, strict=True):
        assert line.startswith(start)


def test_needs_the_base_dependencies_only():
    blocked = "transformers", "tqdm", "triton", "matplotlib", "safetensors"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked})); sys.argv = ['fla-npu', 'doctor', '--json'];"
        "from fla_npu.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    json.loads(result.stdout)


def test_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "fla_npu", "--version"], capture_output=True, text=True)
    assert result.returncode == 0
    assert __version__ in result.stdout
