"""Every environment variable that fla_npu reads; nothing else in the package touches `os.environ`.

| variable | type | default | meaning |
|---|---|---|---|
| `FLA_NPU_IMPL` | str | `auto` | implementation of every op: `auto`, or a name from `fla_npu.ops.dispatch` |
| `FLA_NPU_CHECK_VALUES` | bool | `0` | also check values that cost a device sync (`cu_seqlens`, gate ranges) |
"""

import os


def implementation() -> str:
    """Name of the implementation asked for by `FLA_NPU_IMPL` (`auto` when unset)."""
    return os.environ.get("FLA_NPU_IMPL", "auto")


def check_values() -> bool:
    """Whether `FLA_NPU_CHECK_VALUES` asks for value checks that need a device sync."""
    return os.environ.get("FLA_NPU_CHECK_VALUES", "0") not in ("", "0", "false", "False")
