"""`python -m fla_npu.compiler kernel.py:function --sig q=*bf16,n=i32 --const C=64 [--opt multibuffer=False]`."""

import ast
import json
from pathlib import Path

import click

from fla_npu.cli.errors import CommandError
from fla_npu.compiler.api import compile_build
from fla_npu.compiler.build import KernelBuild
from fla_npu.compiler.handoffs import table
from fla_npu.errors import MissingExtraError


def _pairs(values: tuple[str, ...], option: str) -> dict[str, str]:
    found = {}
    for value in values:
        for pair in value.split(","):
            name, equals, text = pair.partition("=")
            if not equals or not name.strip():
                raise click.BadParameter(f"expected NAME=VALUE, got {pair!r}", param_hint=option)
            found[name.strip()] = text.strip()
    return found


def _literal(text: str) -> int | float | bool | str | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | bool | str) or value is None else text


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("kernel")
@click.option("--sig", multiple=True, help="Argument types: q=*bf16,n=i32; repeatable.")
@click.option("--const", "constants", multiple=True, help="Compile-time arguments: C=64,K=128; repeatable.")
@click.option("--opt", "options", multiple=True, help="Launch keywords: multibuffer=False; repeatable.")
@click.option("--chip", default="910B3", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--save-ir", type=click.Path(path_type=Path), help="Directory for the intermediate programs.")
@click.option("--no-cache", is_flag=True, help="Run the vendor's compiler even if its result is on disk.")
def main(
    kernel: str,
    sig: tuple[str, ...],
    constants: tuple[str, ...],
    options: tuple[str, ...],
    chip: str,
    as_json: bool,
    save_ir: Path | None,
    no_cache: bool,
) -> None:
    """Compile one kernel for one chip and explain its cross-core hand-offs."""
    try:
        build = KernelBuild(
            name=kernel.rpartition(":")[2],
            kernel=kernel,
            signature=_pairs(sig, "--sig"),
            constants={name: _literal(text) for name, text in _pairs(constants, "--const").items()},
            options={name: _literal(text) for name, text in _pairs(options, "--opt").items()},
        )
        compiled = compile_build(build, chip, use_cache=not no_cache)
    except MissingExtraError as error:
        raise CommandError(str(error), "triton-ascend and fla-npu share Python 3.10 and 3.11") from error
    except ValueError as error:
        raise CommandError(str(error), "see --help") from error
    if save_ir is not None:
        compiled.save(save_ir)
    hand_offs = compiled.hand_offs() if compiled.report.verdict == "passed" else ()
    if as_json:
        click.echo(json.dumps({**compiled.report.as_dict(), "hand_offs": [h.as_dict() for h in hand_offs]}))
    else:
        click.echo(compiled.report.text())
        if hand_offs:
            click.echo("hand-offs of the chunk loop")
            click.echo(table(hand_offs))
    if not compiled.report.ok:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
