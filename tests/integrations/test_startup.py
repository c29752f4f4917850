"""The `.pth` file: in environments of its own, at the start of real interpreters."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fla_npu
from fla_npu.cli.main import main
from fla_npu.integrations import startup

REPOSITORY = Path(fla_npu.__file__).parents[1]
PACKAGES = Path(torch.__file__).parents[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A fresh virtual environment with the file in it, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    site_packages = next(folder.glob("[Ll]ib/**/site-packages"))
    assert startup.install(site_packages)
    return folder


def python(environment: Path, code: str, *path: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, path))
    executable = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    result = subprocess.run(
        [executable, "-c", code], capture_output=True, text=True, env=variables, cwd=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_starting_loads_nothing(environment):
    code = (
        "import sys; print(*[name for name in ('torch', 'fla_npu', 'transformers', 'inspect') if name in sys.modules])"
    )
    assert python(environment, code, REPOSITORY, PACKAGES).split() == []


def test_starting_is_cheap(environment):
    """Compiling and running the line: a third of a millisecond."""
    code = f"from tests.work import calls; print(calls(exec, {startup.pth_line()!r}))"
    assert int(python(environment, code, REPOSITORY)) < 200


@pytest.mark.skipif(
    (PACKAGES / "fla").exists() or (PACKAGES / "causal_conv1d").exists(), reason="fla or causal_conv1d is installed"
)
@pytest.mark.parametrize("name", ["fla.ops.kda", "causal_conv1d"])
def test_the_first_import_enables(environment, name):
    code = (
        f"import sys, {name}; from fla_npu.integrations import hook; left = [type(f).__name__ for f in sys.meta_path];"
        f"print({name}.__name__, hook._active is not None, 'EnableOnImport' in left)"
    )
    found = {"fla.ops.kda": "fla_npu.ops.kda", "causal_conv1d": "causal_conv1d"}[name]
    assert python(environment, code, REPOSITORY, PACKAGES).split() == [found, "True", "False"]


def test_a_model_of_transformers_is_served(environment):
    code = (
        "import transformers, torch\n"
        "from transformers.models.qwen3_next import modeling_qwen3_next as module\n"
        "x, g = torch.randn(1, 5, 2, 8), -torch.rand(1, 5, 2)\n"
        "module.torch_chunk_gated_delta_rule(x, x, x, g=g, beta=-g)\n"
        "import fla_npu\n"
        "print(dict(fla_npu.enable().calls))\n"
    )
    assert python(environment, code, REPOSITORY, PACKAGES).splitlines()[0] == "{'chunk_gated_delta_rule': 1}"


def test_an_interpreter_without_fla_npu_is_not_disturbed(environment):
    code = (
        "import sys, importlib.util\n"
        "assert importlib.util.find_spec('fla') is None and importlib.util.find_spec('fla_npu') is None\n"
        "try:\n    import causal_conv1d\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    assert python(environment, code).strip() == "No module named 'causal_conv1d'"


def test_a_broken_fla_npu_is_told_of_and_does_not_break_the_program(environment, tmp_path):
    (tmp_path / "fla_npu.py").write_text("raise ImportError('half of it')")
    code = "try:\n    import fla\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    assert python(environment, code, tmp_path).splitlines()[-2:] == [
        "No module named 'fla'",
        "fla_npu is not enabled: ImportError: half of it",
    ]


class TestCommands:
    def test_install_and_uninstall(self, tmp_path):
        runner = CliRunner()
        file = tmp_path / startup.FILE_NAME
        target = ["--target", str(tmp_path)]
        assert runner.invoke(main, ["install-hook", *target]).stdout == f"installed: {file}\n"
        assert file.read_text().count("\n") == 1 and file.read_text().startswith("import ")
        assert runner.invoke(main, ["install-hook", *target]).stdout == f"already installed: {file}\n"
        file.write_bytes(b"\xff of an older version\n")
        assert runner.invoke(main, ["install-hook", *target]).stdout == f"installed: {file}\n"
        assert file.read_text() == startup.pth_line()
        assert [path.name for path in tmp_path.iterdir()] == [startup.FILE_NAME]
        assert runner.invoke(main, ["uninstall-hook", *target]).stdout == f"removed: {file}\n"
        assert runner.invoke(main, ["uninstall-hook", *target]).stdout == f"not installed: {file}\n"

    def test_a_failure_leaves_nothing(self, tmp_path, monkeypatch):
        def fail(*args):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(startup.os, "replace", fail)
        result = CliRunner().invoke(main, ["install-hook", "--target", str(tmp_path)])
        assert result.exit_code == 1
        assert "Permission denied\nHint: choose a folder with --target" in result.output
        assert not list(tmp_path.iterdir())

    def test_the_default_is_the_environment_of_this_python(self):
        assert startup.default_folder() == Path(sys.prefix) / startup.default_folder().relative_to(sys.prefix)
        assert startup.default_folder().name in ("site-packages", "dist-packages")

    def test_doctor_tells_of_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(startup, "default_folder", lambda: tmp_path)
        output = CliRunner().invoke(main, ["doctor"]).stdout
        assert "fla_npu.enable()\n" in output
        assert "its linear-attention layers call fla_npu" in output
        assert "no: fla-npu install-hook makes it so" in output
        startup.install(tmp_path)
        assert str(tmp_path / startup.FILE_NAME) in CliRunner().invoke(main, ["doctor"]).stdout
