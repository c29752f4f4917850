"""`fla-npu doctor` in process, and the command as a module."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from fla_npu import __version__
from fla_npu.cli import doctor
from fla_npu.cli.main import main
from fla_npu.ops.dispatch import OPS


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


def test_text_names_every_op_and_the_note():
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    for op in OPS:
        assert op in result.stdout
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
