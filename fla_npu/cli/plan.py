"""`fla-npu plan`: how an op would run on a chip, step by step, and what that costs beside the alternatives."""

from pathlib import Path

import click

from fla_npu.cli.errors import CommandError
from fla_npu.errors import MissingExtraError

DEFAULT_TOKENS = 4096


@click.command("plan")
@click.option("--op", required=True, help="Op to plan, such as gdn or kda.")
@click.option("--chip", default="910B3", show_default=True, help="Chip, such as 310P or 910B3.")
@click.option("--heads", type=int, default=16, show_default=True, help="Value heads.")
@click.option("--seq", type=int, help=f"Tokens of a sequence.  [default: {DEFAULT_TOKENS}]")
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences of --seq tokens.")
@click.option("--lengths", help="Tokens of each sequence of a pack instead, such as 100,200.")
@click.option("--head-dim", type=int, default=128, show_default=True, help="Key head size.")
@click.option("--v-head-dim", type=int, help="Value head size.  [default: as the key's]")
@click.option("--dtype", default="fp16", show_default=True, help="fp16, bf16 or fp32.")
@click.option("--precision", default="exact", show_default=True, help="exact or fast, of the Triton kernels.")
@click.option("--no-lower-bound", is_flag=True, help="KDA without lower_bound: decays of any strength.")
@click.option("--chunk", type=int, help="Tokens per chunk.  [default: the best that fits]")
@click.option("--tile", type=int, help="Columns of the state at once.  [default: the best that fits]")
@click.option("--compare", is_flag=True, help="Also show what the alternatives cost.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the plan into this file, a .png.")
def plan_command(
    op: str,
    chip: str,
    heads: int,
    seq: int | None,
    batch: int,
    lengths: str | None,
    head_dim: int,
    v_head_dim: int | None,
    dtype: str,
    precision: str,
    no_lower_bound: bool,
    chunk: int | None,
    tile: int | None,
    compare: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Plan an op on an Ascend chip: order of operators, layouts, heads to cores, and predicted costs. Needs no NPU.

    The report goes to standard output, remarks to standard error.
    """
    from fla_npu.planner.figure import checked, draw
    from fla_npu.planner.plan import plan
    from fla_npu.planner.report import text

    try:
        if plot is not None:
            checked(plot)
        made = plan(
            op,
            chip,
            heads=heads,
            lengths=None if lengths is None else _numbers(lengths),
            seq=DEFAULT_TOKENS if seq is None and lengths is None else seq,
            batch=batch,
            K=head_dim,
            V=head_dim if v_head_dim is None else v_head_dim,
            chunk=chunk,
            tile=tile,
            dtype=dtype,
            precision=precision,
            bounded=not no_lower_bound,
        )
        if plot is not None:
            draw(made, plot)
    except MissingExtraError as error:
        raise CommandError(str(error), "without --plot the command needs no extra") from error
    except OSError as error:
        raise CommandError(f"{plot} cannot be written: {error.strerror}", "name another file") from error
    except (ValueError, TypeError) as error:
        raise CommandError(str(error), "see fla-npu plan --help") from error
    click.echo(made.to_json() if as_json else text(made, compare=compare))
    for remark in made.remarks:
        click.echo(f"note: {remark}", err=True)
    if plot is not None:
        click.echo(f"plot: {plot}", err=True)


def _numbers(lengths: str) -> list[int]:
    try:
        return [int(length) for length in lengths.split(",")]
    except ValueError as error:
        raise ValueError(f"lengths must be numbers with commas between them, got {lengths!r}") from error
