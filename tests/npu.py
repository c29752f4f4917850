"""A machine that says it has an NPU, and triton-ascend: enough to test choices, not to run anything."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fla_npu.ops import dispatch, kernels


def forget_choices() -> None:
    """Nothing decided before counts any more."""
    for cached in (dispatch._choose, kernels._npu_refusal, kernels._reported, kernels._chip):
        cached.cache_clear()


def pretend_npus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """NPUs with these names, in the order of their numbers; none without names."""
    npu = SimpleNamespace(
        get_device_name=lambda number: names[number], is_available=lambda: bool(names), device_count=lambda: len(names)
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    forget_choices()


def pretend_triton(monkeypatch: pytest.MonkeyPatch, folder: Path | None, *, ascend: bool = True) -> None:
    """Triton installed in a folder, with its Ascend backend or without; not installed at all if there is no folder."""
    spec = None
    if folder is not None:
        (folder / "backends" / ("ascend" if ascend else "nvidia")).mkdir(parents=True)
        (folder / "__init__.py").touch()
        spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(kernels, "find_spec", lambda name: spec)
    forget_choices()
