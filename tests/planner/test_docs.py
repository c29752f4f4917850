"""docs/planner.md and docs/published.md say what the planner says today."""

from pathlib import Path

from click.testing import CliRunner

from fla_npu.cli.main import main
from fla_npu.planner import published
from fla_npu.planner.cost import MACHINE, SCHEDULE_FIXED, solve_steps
from fla_npu.planner.mappings import WARMUP

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = "$ fla-npu "


def test_published_figures_are_current():
    """To renew them, put what `python -m fla_npu.planner.published` prints after the page's first lines."""
    _, kept = (DOCS / "published.md").read_text().split("`python -m fla_npu.planner.published`:\n\n")
    assert kept == published.table()


def test_constants_are_those_of_the_model():
    text = (DOCS / "planner.md").read_text()
    rows = {line.split("`")[1]: line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| `")}
    for name in ("operator", "item", "launch"):
        assert rows[f"Machine.{name}"] == f"{getattr(MACHINE, name) * 1e6:.3g} us"
    assert rows["mappings.WARMUP"] == str(WARMUP)
    assert rows["solve_steps"] == f"{solve_steps(64)} for 64 rows"
    assert f"{SCHEDULE_FIXED['scalar']} columns' worth for GDN, {SCHEDULE_FIXED['channel']} for KDA" in text


def test_the_example_is_what_the_command_prints():
    blocks = (DOCS / "planner.md").read_text().split("```\n")
    (block,) = (one for one in blocks if one.startswith(COMMAND))
    command, *lines = block.rstrip("\n").split("\n")
    result = CliRunner().invoke(main, command.removeprefix(COMMAND).split())
    printed = iter(result.stdout.rstrip("\n").split("\n"))
    for line in lines:
        # `in` moves on to the line it finds.
        assert line == "..." or line in printed, f"not printed, or not in this order: {line}"
