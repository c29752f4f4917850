"""The `fla-npu` command: only wires the subcommands."""

import click

from fla_npu import __version__
from fla_npu.cli.compile import compile_command
from fla_npu.cli.doctor import doctor
from fla_npu.cli.generate import generate
from fla_npu.cli.hook import install_hook, uninstall_hook
from fla_npu.cli.migrate import migrate
from fla_npu.cli.plan import plan_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="fla-npu")
def main() -> None:
    """Gated DeltaNet and Kimi Delta Attention: run a model, or see what this machine can do."""


main.add_command(generate)
main.add_command(doctor)
main.add_command(compile_command)
main.add_command(plan_command)
main.add_command(install_hook)
main.add_command(uninstall_hook)
main.add_command(migrate)
