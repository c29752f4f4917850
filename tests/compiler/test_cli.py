"""`fla-npu compile` where the compilers are missing, or are not reached."""

import importlib.metadata
import json

import pytest
from click.testing import CliRunner

from fla_npu.cli.main import main
from fla_npu.compiler import KernelBuild, compile_build, compile_many, lower
from fla_npu.compiler.__main__ import main as module_command
from fla_npu.errors import MissingExtraError

BUILD = KernelBuild("b", "module:function", {"x": "*fp32"})


@pytest.fixture
def no_extra(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(lower.metadata, "version", missing)


@pytest.mark.parametrize("compile_", [compile_build, lambda build: compile_many([build])])
def test_missing_extra_is_named(no_extra, compile_):
    with pytest.raises(MissingExtraError, match=r"triton-ascend is not installed: pip install 'fla-npu\[compile\]'"):
        compile_(BUILD)


def test_missing_compilers_are_named(monkeypatch):
    monkeypatch.setattr(lower.metadata, "version", lambda name: "3.2.0")
    monkeypatch.setattr(lower.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"ascendnpu-ir is not installed: pip install 'fla-npu\[compile\]'"):
        compile_build(BUILD)


def test_commands_say_so_without_a_traceback(no_extra):
    done = CliRunner().invoke(module_command, ["module:function", "--sig", "x=*fp32"])
    assert done.exit_code == 1
    assert "pip install 'fla-npu[compile]'" in done.stderr
    assert done.exception is None or isinstance(done.exception, SystemExit)


@pytest.mark.parametrize("arguments", [[], ["--op", "chunk_gdn", "--all"], ["--all", "--table"]])
def test_one_of_op_and_all_and_table(arguments):
    done = CliRunner().invoke(main, ["compile", *arguments])
    assert done.exit_code == 1
    assert "give one of --op, --all and --table" in done.stderr


def test_the_committed_table_needs_no_extra(no_extra):
    done = CliRunner().invoke(main, ["compile", "--table", "--chip", "Ascend910B3"])
    assert done.exit_code == 0
    assert "## 910B3" in done.stdout and "## 910B1" not in done.stdout
    as_json = CliRunner().invoke(main, ["compile", "--table", "--json"])
    rows = json.loads(as_json.stdout)["rows"]
    assert {row["chip"] for row in rows} >= {"910B3", "910B1", "910_9382"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "chunk_gdn", "--heads", "0"], "--heads"),
        (["--op", "chunk_gdn", "--dtype", "fp8"], "--dtype"),
        (["--all", "--jobs", "0"], "--jobs"),
    ],
)
def test_options_are_checked(arguments, message):
    done = CliRunner().invoke(main, ["compile", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["module:function", "--sig", "x"], "expected NAME=VALUE, got 'x'"),
        (["module:function", "--sig", "x=float"], "signature['x'] must be one of"),
        (["module:function", "--sig", "x=i32", "--opt", "warps=4"], "got warps"),
        (["function", "--sig", "x=i32"], "kernel must be"),
    ],
)
def test_module_command_checks_its_arguments(arguments, message):
    done = CliRunner().invoke(module_command, arguments)
    assert done.exit_code in (1, 2)
    assert message in done.stderr


def test_jobs_are_checked():
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        compile_many([BUILD], jobs=0)
