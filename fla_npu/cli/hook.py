"""`fla-npu install-hook` and `uninstall-hook`: `fla_npu.enable()` for programs one cannot edit."""

from pathlib import Path

import click

from fla_npu.cli.errors import CommandError
from fla_npu.integrations import startup

target = click.option(
    "--target",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Another folder in which Python looks for .pth files.  [default: site-packages of this environment]",
)


@click.command("install-hook")
@target
def install_hook(target: Path | None) -> None:
    """Enable fla_npu in every program of this environment.

    Writes a .pth file. At the start of Python it loads nothing: fla_npu is enabled when a program first imports a model
    of transformers, fla or causal_conv1d.
    """
    folder = target or startup.default_folder()
    try:
        new = startup.install(folder)
    except OSError as error:
        raise CommandError(f"cannot write to {folder}: {error.strerror}", "choose a folder with --target") from error
    click.echo(f"{'installed' if new else 'already installed'}: {folder / startup.FILE_NAME}")


@click.command("uninstall-hook")
@target
def uninstall_hook(target: Path | None) -> None:
    """Remove what install-hook wrote."""
    folder = target or startup.default_folder()
    try:
        removed = startup.uninstall(folder)
    except OSError as error:
        raise CommandError(
            f"cannot remove {folder / startup.FILE_NAME}: {error.strerror}", "remove the file by hand"
        ) from error
    click.echo(f"{'removed' if removed else 'not installed'}: {folder / startup.FILE_NAME}")
