# mypy: allow-untyped-defs, allow-incomplete-defs
"""The one place that knows how triton-ascend 3.2.0, its later versions and plain Triton differ.

The vendor's extensions moved from `triton.language` (3.2.0) to `triton.language.extra.cann.extension` (3.2.1 on), and
neither exists in plain Triton or works in the interpreter. The names below can be used inside `@triton.jit` code on all
of them; where there is no extension, `get_element` is spelled with what Triton has.

Kernel modules import this module, and it imports triton: nothing that must load without triton may import either.
No driver is touched before the functions at the end are called.
"""

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED_CORES = 3
"""Programs per launch where there is no device: a number that divides few task counts, so that tests of kernels see
uneven shares."""


def _first_module(*names: str) -> ModuleType | None:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


@triton.jit
def _probe():
    pass


INTERPRETED = not isinstance(_probe, triton.JITFunction)
"""Whether `@triton.jit` makes interpreted functions (`TRITON_INTERPRET=1`)."""

_extension: ModuleType = _first_module("triton.language.extra.cann.extension") or tl
_GET_ELEMENT = tl.constexpr(not INTERPRETED and hasattr(_extension, "get_element"))


@triton.jit
def get_element(x, i: tl.constexpr):
    """Element i of a vector, as a scalar."""
    if _GET_ELEMENT:
        return _extension.get_element(x, (i,))
    else:
        return tl.sum(tl.where(tl.arange(0, x.shape[0]) == i, x, 0.0), 0)


def launch_options(**options: Any) -> dict[str, Any]:
    """Those of the options that the installed compiler knows; the launcher raises KeyError for others.

    Interpreted functions take none of the vendor's.
    """
    if INTERPRETED:
        return {}
    known = _option_names()
    return {name: value for name, value in options.items() if name in known}


@lru_cache(maxsize=1)
def _option_names() -> frozenset[str]:
    compiler = _first_module("triton.backends.ascend.compiler")
    return frozenset() if compiler is None else frozenset(compiler.NPUOptions.__dataclass_fields__)


def core_count(device: torch.device) -> int:
    """AI cores of a device, each one cube core and two vector cores: the grid of a kernel with `tl.dot`."""
    return _properties(device)["num_aicore"]


def vector_core_count(device: torch.device) -> int:
    """Vector cores of a device: the grid of a kernel without `tl.dot`."""
    return _properties(device)["num_vectorcore"]


def chip_name() -> str | None:
    """Name of the current NPU as the vendor's compiler spells it without the prefix, such as `910B3`; None without."""
    if not (hasattr(torch, "npu") and torch.npu.is_available()):
        return None
    arch: str = _driver().get_current_target().arch
    return arch.removeprefix("Ascend")


def _properties(device: torch.device) -> dict[str, int]:
    if device.type != "npu":
        return {"num_aicore": INTERPRETED_CORES, "num_vectorcore": INTERPRETED_CORES}
    return _npu_properties(device.index or 0)


@lru_cache(maxsize=16)
def _npu_properties(index: int) -> dict[str, int]:
    properties = _driver().utils.get_device_properties(index)
    cores = int(properties["num_aicore"])
    return {"num_aicore": cores, "num_vectorcore": int(properties.get("num_vectorcore", 2 * cores))}


def _driver() -> Any:
    return triton.runtime.driver.active
