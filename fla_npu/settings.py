"""Every environment variable that fla_npu reads; nothing else in the package touches `os.environ`.

| variable | type | default | meaning |
|---|---|---|---|
| `FLA_NPU_IMPL` | str | `auto` | implementation of every op: `auto`, or a name from `fla_npu.ops.dispatch` |
| `FLA_NPU_PRECISION` | str | `exact` | of the chunk kernels: `exact`, or `fast` (16-bit operands for 16-bit inputs) |
| `FLA_NPU_CHECK_VALUES` | bool | `0` | also check values that cost a device sync (`cu_seqlens`, slots, gate ranges) |
| `FLA_NPU_CACHE` | path | see below | directory for what is expensive to make again, such as compiled kernels |
| `FLA_NPU_TUNE` | str | `auto` | tile sizes: `auto` (stored, else shipped), `1` (stored, else tune), `0` (shipped) |

Without `FLA_NPU_CACHE` it is `fla_npu` in `XDG_CACHE_HOME`, or in `~/.cache` where that is unset too.

`fla_npu.backends` also reads FLA's own variables for the backends that other code registers there.
"""

import os
from pathlib import Path
from typing import Literal


def implementation() -> str:
    """Name of the implementation asked for by `FLA_NPU_IMPL` (`auto` when unset)."""
    return os.environ.get("FLA_NPU_IMPL", "auto")


def precision() -> str:
    """What `FLA_NPU_PRECISION` asks for.

    Raises:
        ValueError: it is neither `exact` nor `fast`.
    """
    return checked_precision("FLA_NPU_PRECISION", os.environ.get("FLA_NPU_PRECISION", "exact"))


def checked_precision(name: str, value: str) -> str:
    """`value` if it is a precision; `name` says where it comes from."""
    if value not in ("exact", "fast"):
        raise ValueError(f"{name} must be exact or fast, got {value!r}")
    return value


def check_values() -> bool:
    """Whether `FLA_NPU_CHECK_VALUES` asks for value checks that need a device sync."""
    return os.environ.get("FLA_NPU_CHECK_VALUES", "0") not in ("", "0", "false", "False")


def cache_dir() -> Path:
    """Directory for what is expensive to make again; it may not exist yet."""
    chosen = os.environ.get("FLA_NPU_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fla_npu"


def tuning() -> Literal["auto", "on", "off"]:
    """What `FLA_NPU_TUNE` asks for.

    Raises:
        ValueError: it is neither `auto` nor a boolean.
    """
    value = os.environ.get("FLA_NPU_TUNE", "auto") or "auto"
    words: dict[str, Literal["auto", "on", "off"]] = {
        "auto": "auto", "1": "on", "true": "on", "True": "on", "0": "off", "false": "off", "False": "off",
    }  # fmt: skip
    if value not in words:
        raise ValueError(f"FLA_NPU_TUNE must be auto, 1 or 0, got {value!r}")
    return words[value]


def fla_switch(name: str, default: bool) -> bool:
    """Whether one of FLA's variables is on: set to anything but `0`."""
    value = os.environ.get(name, "")
    return value != "0" if value else default


def tool_environment(search_first: Path | None = None) -> dict[str, str]:
    """Environment for a compiler run as a process: this one's, with a directory put first in `PATH`."""
    path = os.environ.get("PATH", "")
    return {**os.environ, **({"PATH": f"{search_first}{os.pathsep}{path}"} if search_first else {})}


def interprets_triton() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors, if it is not imported yet."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def allow_compiling() -> None:
    """Sets what triton reads at import so that kernels can be compiled here: no interpreter, source lines kept."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "0"
