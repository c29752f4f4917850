"""Every environment variable that fla_npu reads; nothing else in the package touches `os.environ`.

| variable | type | default | meaning |
|---|---|---|---|
| `FLA_NPU_IMPL` | str | `auto` | implementation of every op: `auto`, or a name from `fla_npu.ops.dispatch` |
| `FLA_NPU_CHECK_VALUES` | bool | `0` | also check values that cost a device sync (`cu_seqlens`, gate ranges) |
| `FLA_NPU_CACHE` | path | see below | directory for what is expensive to make again, such as compiled kernels |

Without `FLA_NPU_CACHE` it is `fla_npu` in `XDG_CACHE_HOME`, or in `~/.cache` where that is unset too.
"""

import os
from pathlib import Path


def implementation() -> str:
    """Name of the implementation asked for by `FLA_NPU_IMPL` (`auto` when unset)."""
    return os.environ.get("FLA_NPU_IMPL", "auto")


def check_values() -> bool:
    """Whether `FLA_NPU_CHECK_VALUES` asks for value checks that need a device sync."""
    return os.environ.get("FLA_NPU_CHECK_VALUES", "0") not in ("", "0", "false", "False")


def cache_dir() -> Path:
    """Directory for what is expensive to make again; it may not exist yet."""
    chosen = os.environ.get("FLA_NPU_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fla_npu"


def tool_environment(search_first: Path | None = None) -> dict[str, str]:
    """Environment for a compiler run as a process: this one's, with a directory put first in `PATH`."""
    path = os.environ.get("PATH", "")
    return {**os.environ, **({"PATH": f"{search_first}{os.pathsep}{path}"} if search_first else {})}


def allow_compiling() -> None:
    """Sets what triton reads at import so that kernels can be compiled here: no interpreter, source lines kept."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "0"
