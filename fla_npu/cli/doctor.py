"""`fla-npu doctor`: what is installed, what each op would run on here and why, and what an NPU would need."""

import json
import platform
from importlib import metadata
from typing import Any

import click

from fla_npu.cli.errors import CommandError
from fla_npu.errors import ImplementationError

PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "triton": ("triton",),
    "triton-ascend": ("triton-ascend",),
    "torch_npu": ("torch_npu", "torch-npu"),
    "ascendnpu-ir": ("ascendnpu-ir",),
    "fla": ("fla-core", "flash-linear-attention"),
}
"""Name shown -> distributions that may provide it."""

NO_DEVICE_USED = (
    "fla_npu has not been run on an Ascend device yet. What it says about NPUs comes from the torch_npu and Triton "
    "interfaces, not from a measurement."
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what is installed, what each op would run on here and why, and what is missing for an NPU."""
    try:
        findings = examine()
    except ImplementationError as error:
        raise CommandError(str(error), "unset FLA_NPU_IMPL, or set it to one of these names") from error
    if as_json:
        click.echo(json.dumps(findings))
        return
    click.echo("installed")
    for name, version in findings["installed"].items():
        click.echo(f"  {name:<16}{version or '-'}")
    click.echo(f"device\n  {findings['device']}")
    click.echo("ops")
    for name, choice in findings["ops"].items():
        click.echo(f"  {name:<26}{choice['implementation']:<10}{choice['reason']}")
    click.echo("for an NPU")
    for line in findings["missing_for_npu"] or ["nothing is missing"]:
        click.echo(f"  {line}")
    click.echo(f"note\n  {findings['note']}")


def examine() -> dict[str, Any]:
    """The findings, as `--json` prints them."""
    from fla_npu import __version__
    from fla_npu.ops.dispatch import OPS, explain

    device = _device()
    installed: dict[str, str | None] = {"fla_npu": __version__, "python": platform.python_version()}
    installed |= {name: _version(distributions) for name, distributions in PACKAGES.items()}
    choices = {op: explain(op, device) for op in OPS}
    return {
        "installed": installed,
        "device": device,
        "ops": {op: {"implementation": it.implementation, "reason": it.reason} for op, it in choices.items()},
        "missing_for_npu": _missing_for_npu(installed, device),
        "note": NO_DEVICE_USED,
    }


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _device() -> str:
    """`npu` when PyTorch can use one (torch_npu registers itself as `torch.npu`), else `cpu`."""
    import torch

    npu = getattr(torch, "npu", None)
    return "npu" if npu is not None and npu.is_available() else "cpu"


def _missing_for_npu(installed: dict[str, str | None], device: str) -> list[str]:
    missing = []
    if not installed["torch_npu"]:
        missing.append("torch_npu, PyTorch's Ascend backend: pip install 'fla-npu[npu]'")
    elif device != "npu":
        missing.append("an Ascend device that torch_npu can use: check the driver with `npu-smi info`, and CANN")
    if not installed["triton-ascend"]:
        missing.append("triton-ascend, for kernels: pip install 'fla-npu[triton]' (Python below 3.12)")
    if installed["triton"] and installed["triton-ascend"]:
        missing.append("remove triton: it installs the same import name as triton-ascend")
    return missing
