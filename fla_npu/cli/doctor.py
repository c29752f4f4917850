"""`fla-npu doctor`: what is installed, what each op would run on here and on NPUs and why, what an NPU would need."""

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
    "fla_npu has not been run on an Ascend device yet. What it says about NPUs comes from the vendor's compiler, "
    "Triton's interpreter and a simulator, not from a device."
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what is installed, what each op would run on here and on an NPU and why, and what is missing for one."""
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
    for device in findings["devices"]:
        name = f" ({device['name']})" if device["name"] else ""
        click.echo(f"ops on {device['device']}{name}")
        _print_ops(device["ops"])
    for group in findings["on_npus"]:
        click.echo(f"ops on an NPU, were there one: {', '.join(group['chips'])}")
        _print_ops(group["ops"])
    click.echo("fla_npu.enable()")
    for name, route in findings["enable"]["routes"].items():
        click.echo(f"  {name:<16}{route}")
    for name, reason in findings["enable"]["skipped"].items():
        click.echo(f"  {name:<16}left alone: {reason}")
    click.echo(f"  {'at start-up':<16}{findings['enable']['startup'] or 'no: fla-npu install-hook makes it so'}")
    click.echo(f"precision of kernels\n  {findings['precision']}")
    click.echo("for an NPU")
    for line in findings["missing_for_npu"] or ["nothing is missing"]:
        click.echo(f"  {line}")
    click.echo(f"note\n  {findings['note']}")


def _print_ops(ops: dict[str, dict[str, str | None]]) -> None:
    """One line for each op, or for all when they agree."""
    first = next(iter(ops.values()))
    lines = {"every op": first} if all(choice == first for choice in ops.values()) else ops
    for name, choice in lines.items():
        click.echo(f"  {name:<26}{choice['implementation'] or '-':<10}{choice['reason']}")


def examine() -> dict[str, Any]:
    """The findings, as `--json` prints them."""
    from fla_npu import __version__
    from fla_npu.ops.kernels import precision

    try:
        asked = precision()
    except ValueError as error:
        raise CommandError(str(error), "unset the variable") from error
    devices = _devices()
    device = devices[0]["device"].partition(":")[0]
    installed: dict[str, str | None] = {"fla_npu": __version__, "python": platform.python_version()}
    installed |= {name: _version(distributions) for name, distributions in PACKAGES.items()}
    return {
        "installed": installed,
        "device": device,
        "ops": devices[0]["ops"],
        "devices": devices,
        "on_npus": _on_npus(),
        "enable": _enabling(),
        "precision": asked,
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


def _devices() -> list[dict[str, Any]]:
    """The NPUs that PyTorch can use (torch_npu registers itself as `torch.npu`), then the CPU, and what runs there."""
    import torch

    npu: Any = getattr(torch, "npu", None)
    count = npu.device_count() if npu is not None and npu.is_available() else 0
    names = {f"npu:{i}": npu.get_device_name(i) for i in range(count)} | {"cpu": None}
    return [{"device": device, "name": name, "ops": _choices(device)} for device, name in names.items()]


def _enabling() -> dict[str, Any]:
    """What `fla_npu.enable()` does here, and the file that calls it in every program, if there is one."""
    from fla_npu.integrations import startup
    from fla_npu.integrations.hook import enabled

    with enabled() as report:
        routes, skipped = dict(report.routes), dict(report.skipped)
    file = startup.default_folder() / startup.FILE_NAME
    return {"routes": routes, "skipped": skipped, "startup": str(file) if file.exists() else None}


def _on_npus() -> list[dict[str, Any]]:
    """What would run on NPUs: chips on which the same does, for the same reasons, together."""
    from fla_npu.planner.chips import CHIPS

    groups: list[dict[str, Any]] = []
    for chip in CHIPS:
        ops = _choices("npu", chip)
        group = next((group for group in groups if group["ops"] == ops), None)
        if group is None:
            groups.append({"chips": [chip], "ops": ops})
        else:
            group["chips"].append(chip)
    return groups


def _choices(device: str, chip: str | None = None) -> dict[str, dict[str, str | None]]:
    """What runs each op; nothing where what FLA_NPU_IMPL asks for cannot, and why."""
    from fla_npu.ops.dispatch import OPS, check_request, explain

    check_request()
    choices: dict[str, dict[str, str | None]] = {}
    for op in OPS:
        try:
            implementation, reason = explain(op, device, chip=chip)
            choices[op] = {"implementation": implementation, "reason": reason}
        except ImplementationError as error:
            choices[op] = {"implementation": None, "reason": str(error)}
    return choices


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
