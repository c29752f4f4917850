"""`fla-npu plan` in process: data on standard output, remarks on standard error, errors with a hint."""

import builtins
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fla_npu.cli.main import main
from fla_npu.planner.plan import Plan, plan


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def test_report_has_order_layouts_cores_and_costs():
    result = run("--op", "kda", "--chip", "310P", "--heads", "16", "--seq", "4096")
    assert result.exit_code == 0
    made = plan("kda", "310P", heads=16, seq=4096)
    sections = result.stdout.split("\n\n")
    assert [section.split()[0] for section in sections] == ["kda", "order", "layouts", "cores:", "predicted"]
    rows = sections[1].splitlines()[2:]
    assert [row.split()[1] for row in rows] == list(made.order)
    assert float(rows[0].split()[4]) == pytest.approx(made.steps[0].live[0] / 1024, abs=0.05)
    assert "ours" in sections[4] and "FlashQLA" not in sections[4]
    assert "triton-ascend has no 310P target" in result.stderr and "note:" not in result.stdout


def test_compare_shows_the_alternatives():
    result = run("--op", "gdn", "--chip", "910B3", "--compare")
    costs = result.stdout.split("\n\n")[4]
    for name in ("separate operators", "FLA", "FLA in one launch", "FlashQLA", "ours, default order", "x ours"):
        assert name in costs


def test_report_of_a_call_in_segments_is_of_its_launches():
    result = run("--op", "gdn", "--chip", "910B3", "--heads", "1", "--seq", "65536")
    cores = result.stdout.split("\n\n")[3].splitlines()
    assert cores[0].startswith("cores: 20 column blocks whole; ")
    assert cores[1] == "  a launch over 5 segments; there are three like it"
    assert cores[3].startswith("  0-19 ")


def test_json_is_the_plan_and_nothing_else():
    result = run("--op", "gdn", "--chip", "Ascend910B3", "--lengths", "100,200", "--dtype", "bf16", "--json")
    assert Plan.from_json(result.stdout) == plan("gdn", "910B3", heads=16, lengths=[100, 200], dtype="bf16")
    assert json.loads(result.stdout)["request"]["chip"] == "910B3"


def test_sizes_are_passed_on():
    result = run(
        "--op", "gla", "--chip", "310B1", "--heads", "3", "--seq", "70", "--batch", "2", "--head-dim", "100",
        "--v-head-dim", "70", "--chunk", "32", "--tile", "64", "--json",
    )  # fmt: skip
    made = Plan.from_json(result.stdout)
    assert made.request.lengths == (70, 70) and (made.request.K, made.request.V) == (100, 70)
    assert (made.config.chunk, made.config.width) == (32, 64)


def test_decays_without_a_bound_take_the_sizes_of_kernels_for_them():
    call = "--op", "kda", "--chip", "910B3", "--seq", "16", "--json"
    made = [Plan.from_json(run(*call, *more).stdout) for more in ((), ("--no-lower-bound",))]
    assert [one.request.bounded for one in made] == [True, False]
    assert made[1] == plan("kda", "910B3", heads=16, seq=16, bounded=False)
    assert made[0].config != made[1].config and any("mild decays" in one for one in made[1].remarks)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--op", "kda", "--chip", "310P", "--heads", "16"),
        ("--op", "gdn", "--chip", "910B3", "--lengths", "100,2000,33,4096", "--heads", "6"),
        ("--op", "gdn", "--chip", "910B3", "--lengths", "65536", "--heads", "1"),
    ],
)
def test_plot_is_a_picture(arguments: tuple[str, ...], tmp_path: Path):
    path = tmp_path / "plan.png"
    result = run(*arguments, "--seq" if "--lengths" not in arguments else "--batch", "1", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
    assert f"plot: {path}" in result.stderr


def test_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = builtins.__import__

    def refuse(name: str, *rest: object, **more: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    result = run("--op", "gdn", "--chip", "310P", "--plot", str(tmp_path / "plan.png"))
    assert result.exit_code == 1 and result.stdout == ""
    assert "pip install 'fla-npu[plot]'" in result.stderr and "Hint: " in result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan.jpg", "plot must be a path that ends in .png, got "),
        ("plan", "plot must be a path that ends in .png, got "),
        ("folder.png", "plot must be a file, got the folder "),
        ("no/plan.png", "plot must be in a folder that exists, got "),
    ],
)
def test_plot_into_what_is_no_place_for_it(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr("fla_npu.planner.plan.plan", None)  # Nothing is planned first.
    result = run("--op", "gdn", "--chip", "310P", "--plot", str(tmp_path / name))
    assert result.exit_code == 1 and result.stdout == ""
    assert message in result.stderr and name in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.png"]


def test_plot_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fla_npu.planner.figure.draw", refuse)
    result = run("--op", "gdn", "--chip", "310P", "--plot", str(tmp_path / "plan.png"))
    assert result.exit_code == 1 and "plan.png cannot be written: Permission denied" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "gdn", "--chip", "310P", "--heads", "0"), "heads must be at least 1, got 0"),
        (("--op", "gdn", "--chip", "310Q"), "did you mean 310P"),
        (("--op", "chunk_gdn", "--chip", "310P"), "op must be one of gdn, kda"),
        (("--op", "gdn", "--no-lower-bound"), "bounded must be True for gdn"),
        (("--op", "gdn", "--chip", "310P", "--lengths", "1,two"), "lengths must be numbers with commas between them"),
        (("--op", "gdn", "--chip", "310P", "--lengths", "1,2", "--seq", "3"), "got both"),
        (("--op", "kda", "--chip", "310P", "--head-dim", "512", "--chunk", "64", "--tile", "128"), "would"),
        (("--op", "kda", "--chip", "310P", "--head-dim", "9000"), "K must be at most"),
    ],
)
def test_errors_end_with_a_hint(arguments: tuple[str, ...], message: str):
    result = run(*arguments)
    assert result.exit_code == 1 and result.stdout == ""
    assert message in result.stderr and "Hint: see fla-npu plan --help" in result.stderr


def test_op_must_be_given():
    result = run("--chip", "310P")
    assert result.exit_code == 2 and "--op" in result.stderr
