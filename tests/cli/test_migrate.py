"""`fla-npu migrate` on sources as they are written, and its handling of files."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fla_npu.cli import migrate as module
from fla_npu.cli.migrate import migrate, rewrite

REWRITTEN = {
    "a module": ("import fla\n", "import fla_npu\n"),
    "a submodule and its uses": (
        "import fla.ops.kda\nprint(fla.ops.kda.chunk_kda, fla.__version__)\n",
        "import fla_npu.ops.kda\nprint(fla_npu.ops.kda.chunk_kda, fla_npu.__version__)\n",
    ),
    "under another name": (
        "import os, fla.ops as o, torch\nfla = o.chunk_kda\n",
        "import os, fla_npu.ops as o, torch\nfla = o.chunk_kda\n",
    ),
    "from the root": (
        "from fla import layers, ops as o\nlayers.GatedDeltaNet\n",
        "from fla_npu import layers, ops as o\nlayers.GatedDeltaNet\n",
    ),
    "from a submodule": (
        "from fla.layers import GatedDeltaNet as G  # fla\n",
        "from fla_npu.layers import GatedDeltaNet as G  # fla\n",
    ),
    "many lines": (
        "from fla.modules import (\n    RMSNorm,  # of fla\n    GatedMLP as M,\n)\n",
        "from fla_npu.modules import (\n    RMSNorm,  # of fla\n    GatedMLP as M,\n)\n",
    ),
    "a continued line": (
        "from \\\n  fla.utils \\\n  import device, \\\n  IS_NPU\n",
        "from \\\n  fla_npu.utils \\\n  import device, \\\n  IS_NPU\n",
    ),
    "within functions": (
        "def f(x):\n    import fla\n    if x: from fla.ops import chunk_kda; return fla.ops\n",
        "def f(x):\n    import fla_npu\n    if x: from fla_npu.ops import chunk_kda; return fla_npu.ops\n",
    ),
    "models, which need an extra": (
        "from fla.models import KDAConfig\nfrom fla.models.utils import Cache\n",
        "from fla_npu.models import KDAConfig\nfrom fla_npu.models.utils import Cache\n",
    ),
    "what came with the other ops": (
        "from fla.ops.simple_gla import chunk_simple_gla\nfrom fla.layers import DeltaNet\n"
        "from fla.models import GLAForCausalLM, RetNetConfig as R\n",
        "from fla_npu.ops.simple_gla import chunk_simple_gla\nfrom fla_npu.layers import DeltaNet\n"
        "from fla_npu.models import GLAForCausalLM, RetNetConfig as R\n",
    ),
    "after wide characters": (
        "é = '→'; import fla; print('→', fla.ops, é)\n",
        "é = '→'; import fla_npu; print('→', fla_npu.ops, é)\n",
    ),
    "after a form feed": (
        "x = 1\n\f\nimport fla\ny = '\x0b'; fla.ops\n",
        "x = 1\n\f\nimport fla_npu\ny = '\x0b'; fla_npu.ops\n",
    ),
    "a name bound twice": (
        "import fla, fla.ops\ndef f(fla): return fla.ops\n",
        "import fla_npu as fla, fla_npu.ops, fla_npu as fla\ndef f(fla): return fla.ops\n",
    ),
    "a name that is exported": (
        "import fla\n__all__ = ['fla']\n",
        "import fla_npu as fla\n__all__ = ['fla']\n",
    ),
    "a name in an annotation": (
        "import fla.layers\ndef f(x: 'list[fla.layers.GatedDeltaNet]'): ...\n",
        "import fla_npu.layers, fla_npu as fla\ndef f(x: 'list[fla.layers.GatedDeltaNet]'): ...\n",
    ),
    "a name in a type comment": (
        "import fla\nx = f()  # type: list[fla.layers.GatedDeltaNet]\n",
        "import fla_npu as fla\nx = f()  # type: list[fla.layers.GatedDeltaNet]\n",
    ),
    "a name that is assigned": ("import fla\nfla = None\n", "import fla_npu as fla\nfla = None\n"),
    "a name that is missing": (
        "try:\n    import fla\nexcept ImportError:\n    fla = None\n",
        "try:\n    import fla_npu as fla\nexcept ImportError:\n    fla = None\n",
    ),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name):
    before, after = REWRITTEN[name]
    assert rewrite(before) == (after, [])
    ast.parse(after)
    # What is left is nothing to do.
    assert rewrite(after) == (after, [])
    for text in (before, after):
        assert rewrite(text.replace("\n", "\r\n")).source == after.replace("\n", "\r\n")


def test_names_in_f_strings():
    before = 'import fla\nprint(f"{fla.__version__!r} of fla")\n'
    after = before.replace("fla\n", "fla_npu\n", 1).replace("{fla", "{fla_npu")
    if sys.version_info < (3, 12):
        after = before.replace("import fla", "import fla_npu as fla")
    assert rewrite(before) == (after, [])


@pytest.mark.parametrize(
    "source",
    [
        "import flash, fla_utils, flax.linen as fla\nfrom flash_attn import fla\n",
        "from .fla import x\nfrom . import fla\nfla.ops\n",
        "'''import fla'''\n# from fla.ops import chunk_kda\nx = 'fla.ops'\nimportlib.import_module('fla')\n",
        "x.fla.ops, fla.ops, fla\n",
        "",
    ],
)
def test_left_alone(source):
    assert rewrite(source) == (source, [])


KEPT = {
    "an op": (
        "from fla.ops import chunk_kda, chunk_nothing\n",
        "from fla_npu.ops import chunk_kda\nfrom fla.ops import chunk_nothing\n",
        [(1, "kept: fla_npu has no ops.chunk_nothing")],
    ),
    "in many lines": (
        "if x:\n  from fla.layers import (\n    GatedDeltaNet as G,\n    Nothing,\n  )\n",
        "if x:\n  from fla_npu.layers import (\n      GatedDeltaNet as G,\n  )\n"
        "  from fla.layers import (\n      Nothing,\n  )\n",
        [(4, "kept: fla_npu has no layers.Nothing")],
    ),
    "within a line": (
        "if x: from fla.ops import chunk_kda, chunk_nothing; y = 1\n",
        "if x: from fla_npu.ops import chunk_kda; from fla.ops import chunk_nothing; y = 1\n",
        [(1, "kept: fla_npu has no ops.chunk_nothing")],
    ),
    "with comments": (
        "from fla.ops import (\n    chunk_kda,  # mine\n    chunk_nothing,\n)\n",
        None,
        [
            (1, "kept: fla_npu.ops has chunk_kda; split this, whose comments would get lost"),
            (3, "kept: fla_npu has no ops.chunk_nothing"),
        ],
    ),
    "a module": ("import fla.nothing\nimport fla.ops\nfla.ops\n", None, [(1, "kept: fla_npu has no nothing")]),
    "a use of a module": (
        "import fla\nfla.ops.chunk_kda\n\nfla.ops.chunk_nothing(fla.ops.kda.nothing)\n",
        None,
        [(4, "kept: fla_npu has no ops.chunk_nothing"), (4, "kept: fla_npu has no ops.kda.nothing")],
    ),
    "a use of a module under another name": (
        "import fla.ops as o\nfrom fla import layers, ops\no.nothing, ops.chunk_kda, layers.Nothing\n",
        "import fla.ops as o\nfrom fla_npu import ops\nfrom fla import layers\n"
        "o.nothing, ops.chunk_kda, layers.Nothing\n",
        [(3, "kept: fla_npu has no layers.Nothing"), (3, "kept: fla_npu has no ops.nothing")],
    ),
    "all of a module": (
        "from fla.ops import *\n",
        None,
        [(1, "kept: what `from fla.ops import *` binds cannot be told")],
    ),
    "nothing of a module": ("from fla.nothing import x\n", None, [(1, "kept: fla_npu has no nothing.x")]),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    before, after, remarks = KEPT[name]
    after = before if after is None else after
    assert rewrite(before) == (after, remarks)
    ast.parse(after)
    assert rewrite(after).source == after
    assert rewrite(before.replace("\n", "\r\n")).source == after.replace("\n", "\r\n")


def run(*arguments: object):
    return CliRunner().invoke(migrate, [str(x) for x in arguments])


def test_files_and_folders(tmp_path):
    for name in ("a.py", "b.pyi", "c.txt", "sub/d.py", ".hidden/e.py", "venv/f.py", "__pycache__/g.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import fla\n")
    (tmp_path / "venv/pyvenv.cfg").touch()
    os.chmod(tmp_path / "a.py", 0o751)
    (tmp_path / "link.py").symlink_to("sub/d.py")
    result = run(tmp_path, tmp_path / "c.txt")
    assert run(tmp_path, "--check").exit_code == 0  # and no link is left to do
    changed = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file() and "fla_npu" in p.read_text()}
    assert changed == {"a.py", "b.pyi", "c.txt", "sub/d.py", "link.py"}
    assert result.exit_code == 0 and result.stdout == "" and "4 files changed, 0 places kept" in result.stderr
    assert (tmp_path / "link.py").is_symlink() and (tmp_path / "a.py").stat().st_mode & 0o777 == 0o751
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["a.py", "b.pyi", "c.txt", "sub", ".hidden", "venv", "__pycache__", "link.py"]
    )


def test_check_and_diff_write_nothing(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("import fla\nfrom fla.ops import nothing\n")
    result = run("--check", path)
    assert result.exit_code == 1 and f"would rewrite {path}" in result.stderr
    assert f"{path}:2: kept: fla_npu has no ops.nothing" in result.stderr
    result = run("--diff", path)
    assert result.exit_code == 0 and "-import fla\n+import fla_npu\n" in result.stdout
    assert path.read_text() == "import fla\nfrom fla.ops import nothing\n"
    assert run("--check", "--diff", path).exit_code == 1
    assert run(path).exit_code == 0 and run("--check", path).exit_code == 0


def test_links_out_of_a_folder_are_not_followed(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.py").write_text("import fla\n")
    (inside / "file.py").symlink_to(outside / "a.py")
    (inside / "folder").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    (inside / "nothing.py").symlink_to("not there")
    result = run(inside)
    assert result.exit_code == 0 and "1 files changed, 0 places kept" in result.stderr
    assert (inside / "a.py").read_text() == "import fla_npu\n" and (outside / "a.py").read_text() == "import fla\n"
    # A link that is named is meant; it stays a link.
    assert run(inside / "file.py").exit_code == 0
    assert (outside / "a.py").read_text() == "import fla_npu\n" and (inside / "file.py").is_symlink()


def test_read_only_files_stay(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("import fla\n")
    path.chmod(0o444)
    result = run(path)
    assert result.exit_code == 123 and f"{path}: cannot be migrated: it is read-only" in result.stderr
    assert path.read_text() == "import fla\n"
    assert run("--check", path).exit_code == 1 and run("--diff", path).exit_code == 0


def test_remarks_alone_are_no_failure(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("from fla.ops import nothing\n")
    for options in ([], ["--check"], ["--diff"]):
        result = run(*options, path)
        assert result.exit_code == 0 and "0 files " in result.stderr and "1 places kept" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--nothing", "."], ["not/there.py"]])
def test_usage(arguments):
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("encoding", "newline"),
    # Python itself finds no declaration of an encoding where \r ends lines.
    [(e, n) for e in ("utf-8", "utf-8-sig", "latin-1") for n in ("\n", "\r\n", "\r") if (e, n) != ("latin-1", "\r")],
)
def test_bytes_around_the_edits_stay(encoding, newline, tmp_path):
    path = tmp_path / "a.py"
    cookie = "# -*- coding: latin-1 -*-\n" if encoding == "latin-1" else ""
    text = cookie + "# é\nx = 'é'; import fla; print('é', fla.ops)\n# é"
    path.write_bytes(text.replace("\n", newline).encode(encoding))
    assert run(path).exit_code == 0
    expected = text.replace("import fla", "import fla_npu").replace("fla.ops", "fla_npu.ops")
    assert path.read_bytes() == expected.replace("\n", newline).encode(encoding)


def test_files_that_cannot_be_read_stay_and_do_not_stop_the_others(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("import fla\nprint 1\n")
    (tmp_path / "b.py").write_bytes(b"import fla\nx = '\xff'\n")
    (tmp_path / "c.py").write_text("import fla\n")
    result = run(tmp_path)
    assert result.exit_code == 123 and "1 files changed, 0 places kept, 2 files failed" in result.stderr
    assert (tmp_path / "a.py").read_text() == "import fla\nprint 1\n"
    assert "fla_npu" in (tmp_path / "c.py").read_text()

    def broken(*_):
        raise OSError("disk full")

    (tmp_path / "c.py").write_text("import fla\n")
    monkeypatch.setattr(module.os, "replace", broken)
    result = run(tmp_path / "c.py")
    assert result.exit_code == 123 and "disk full" in result.stderr
    assert (tmp_path / "c.py").read_text() == "import fla\n"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "source, reason",
    [
        (b"import fla\0\n", "null bytes"),
        (b"# coding: rot13\nimport fla\n", "not a text encoding"),
        (b"import fla\nx = " + 200000 * b"-" + b"1\n", r"\w"),
        ("import \ufb02a\n".encode(), "line 1 spells fla with other characters"),
    ],
    ids=["null characters", "an encoding of no text", "deep nesting", "a ligature"],
)
def test_hostile_files(source, reason, tmp_path):
    (tmp_path / "a.py").write_bytes(source)
    (tmp_path / "b.py").write_text("import fla\n")
    result = run(tmp_path)
    assert result.exit_code == 123 and "1 files changed, 0 places kept, 1 files failed" in result.stderr
    assert re.search(rf"a.py: cannot be migrated: .*{reason}", result.stderr)
    assert (tmp_path / "a.py").read_bytes() == source


def test_notebooks_are_refused(tmp_path):
    """They parse: JSON is an expression."""
    (tmp_path / "a.ipynb").write_text('{"source": ["import fla"]}')
    result = run(tmp_path / "a.ipynb")
    assert result.exit_code == 123 and "notebooks are not read" in result.stderr


def test_a_migrated_program_runs(tmp_path):
    """The README's imports, with FLA's names, end to end."""
    path = tmp_path / "program.py"
    path.write_text(
        "import torch\nimport fla.modules.l2norm\n"
        "from fla.layers import GatedDeltaNet\nfrom fla.ops.kda import chunk_kda\n"
        "layer = GatedDeltaNet(hidden_size=16, head_dim=8, num_heads=1)\n"
        "y = fla.modules.l2norm.l2norm(layer(torch.ones(1, 3, 16))[0])\n"
    )
    assert run(path).exit_code == 0
    names: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert names["y"].shape == (1, 3, 16) and names["chunk_kda"].__module__.startswith("fla_npu")


def test_the_command_is_wired():
    from fla_npu.cli.main import main

    assert "Change imports of fla" in CliRunner().invoke(main, ["migrate", "--help"]).output
    assert run(Path("nothing.py")).exit_code == 2
