"""`fla-npu compile`: compile kernels for Ascend chips without one, and show what they will move and compute."""

import json
from collections.abc import Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import click

from fla_npu.cli.errors import CommandError
from fla_npu.errors import MissingExtraError

CHIPS = ("910B3", "910B1", "910_9382", "950")
"""What `--all` compiles for unless chips are named: one of each core count of A2 and A3, and A5."""


@click.command("compile")
@click.option("--op", help="Op to compile, such as chunk_gdn or chunk_kda.")
@click.option("--all", "everything", is_flag=True, help="Compile every kernel that ships, and print one table.")
@click.option(
    "--table", "committed", is_flag=True, help="Print the table that comes with the package; compiles nothing."
)
@click.option("--chip", "chips", multiple=True, help="Chip, repeatable.  [default: 910B3; with --all four chips]")
@click.option("--heads", type=click.IntRange(min=1), default=32, show_default=True, help="Value heads.")
@click.option("--seq", type=click.IntRange(min=1), default=8192, show_default=True, help="Tokens.")
@click.option("--dtype", type=click.Choice(["fp16", "bf16", "fp32"]), default="bf16", show_default=True)
@click.option("--head-dim", type=click.IntRange(min=1), default=128, show_default=True, help="Key head size.")
@click.option("--v-head-dim", type=click.IntRange(min=1), help="Value head size.  [default: as the key's]")
@click.option("--precision", default="exact", show_default=True, help="exact or fast.")
@click.option("--chunk", type=click.IntRange(min=1), help="Tokens per chunk.  [default: the chip's]")
@click.option("--tile", type=click.IntRange(min=1), help="Columns of the state per program.  [default: the chip's]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with --op one object a chip.")
@click.option(
    "--save-ir", type=click.Path(file_okay=False, path_type=Path), help="Keep the intermediate programs here."
)
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Compilers at a time.")
@click.option("--no-cache", is_flag=True, help="Compile anew even if the result is on disk.")
def compile_command(
    op: str | None,
    everything: bool,
    committed: bool,
    chips: tuple[str, ...],
    heads: int,
    seq: int,
    dtype: str,
    head_dim: int,
    v_head_dim: int | None,
    precision: str,
    chunk: int | None,
    tile: int | None,
    as_json: bool,
    save_ir: Path | None,
    jobs: int,
    no_cache: bool,
) -> None:
    """Compile kernels for a chip with the vendor's compiler, on any x86-64 machine.

    Exits with 0 when every kernel compiles and passes its checks, with 1 otherwise; --table always with 0.
    """
    if everything + committed + (op is not None) != 1:
        raise CommandError(
            "give one of --op, --all and --table", "for example: fla-npu compile --op chunk_gdn --chip 910B3"
        )
    try:
        if committed:
            ok = _table(chips, as_json)
        elif everything:
            ok = _all(chips or CHIPS, as_json, save_ir, jobs, not no_cache)
        else:
            shape = {
                "dtype": dtype,
                "K": head_dim,
                "V": v_head_dim or head_dim,
                "heads": heads,
                "seq": seq,
                "precision": precision,
                "chunk": chunk,
                "tile": tile,
            }
            results = [_one(op or "", name, shape, as_json, save_ir, not no_cache) for name in chips or ("910B3",)]
            ok = all(results)
    except MissingExtraError as error:
        raise CommandError(str(error), "triton-ascend and fla-npu share Python 3.10 and 3.11") from error
    except (ValueError, TypeError) as error:
        raise CommandError(str(error), "see fla-npu compile --help") from error
    if not ok:
        raise SystemExit(1)


def _builds() -> Any:
    """The module that knows which kernels there are; like the compiler it is loaded only when asked for."""
    from fla_npu.compiler.lower import require_extra

    require_extra()
    return import_module("fla_npu.ops.common.builds")


def _one(op: str, chip: str, shape: dict[str, Any], as_json: bool, save_ir: Path | None, use_cache: bool) -> bool:
    from fla_npu.compiler.api import compile_build
    from fla_npu.compiler.evaluate import Program, launch
    from fla_npu.compiler.report import totals_text

    build, scalars, arrays, grid = _builds().build_for(op, chip, **shape)
    compiled = compile_build(build, chip, use_cache=use_cache)
    report = compiled.report
    if save_ir is not None:
        compiled.save(save_ir)
    record = report.as_dict()
    totals = None
    if report.verdict == "passed":
        totals = Program(compiled.module, compiled.arguments).launch_totals(launch(grid, scalars, arrays))
        record["launch"] = {"grid": grid, "scalars": dict(scalars), **totals.as_dict()}
    if as_json:
        click.echo(json.dumps(record))
    else:
        click.echo(report.text())
        if totals is not None:
            click.echo(f"  the whole launch: grid {grid}, {', '.join(f'{k} {v}' for k, v in scalars.items())}")
            click.echo("\n".join(f"    {line}" for line in totals_text(totals)))
    return report.ok


def _table(chips: Sequence[str], as_json: bool) -> bool:
    from fla_npu.compiler import table
    from fla_npu.planner.chips import chip

    found, names = table.load(), {chip(name).name for name in chips}
    rows = [row for row in found["rows"] if not names or row["chip"] in names]
    if as_json:
        click.echo(json.dumps({**found, "rows": rows}))
    else:
        click.echo(table.text({**found, "rows": rows}), nl=False)
    return True


def _all(chips: Sequence[str], as_json: bool, save_ir: Path | None, jobs: int, use_cache: bool) -> bool:
    from fla_npu.compiler.api import Compiled, compile_many
    from fla_npu.compiler.report import table

    shipped = _builds().shipped()
    total, number = len(shipped) * len(chips), count(1)

    def progress(result: Compiled) -> None:
        report = result.report
        click.echo(f"{next(number)}/{total} {report.name} {report.chip} {'ok' if report.ok else 'FAILED'}", err=True)

    results = compile_many(shipped, chips, jobs=jobs, progress=progress, use_cache=use_cache)
    if save_ir is not None:
        for result in results:
            result.save(save_ir)
    reports = [result.report for result in results]
    failed = sum(not report.ok for report in reports)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "reports": [report.as_dict() for report in reports]}))
    else:
        click.echo(table(reports))
        click.echo(f"{len(reports) - failed} of {len(reports)} pass")
    return not failed
