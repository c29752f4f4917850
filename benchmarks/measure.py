"""Clock, memory and load of this process."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
SAMPLE_SECONDS = 0.02
"""A sample lasts at least this long, short calls are repeated inside it."""
SHORT_CALL_SECONDS = 0.25
"""Calls below this get an untimed call before each sample: another implementation has just used the caches and the
threads of its own pool may still be spinning."""


@dataclass(frozen=True)
class Peak:
    """What one call took beyond what was there before: seconds, and bytes at the highest point less the results."""

    seconds: float
    extra_bytes: int
    result_bytes: int


def first_call(call: Callable) -> Peak:
    """Time and peak memory of one call. Linux keeps the high-water mark of the resident set and can reset it."""
    gc.collect()
    # Modules are not garbage; without this every later collection walks transformers again.
    gc.freeze()
    _trim()
    CLEAR_REFS.write_text(RESET_PEAK)
    before = _resident("VmRSS")
    start = time.perf_counter()
    results = call()
    seconds = time.perf_counter() - start
    result_bytes = sum(x.numel() * x.element_size() for x in results if isinstance(x, torch.Tensor))
    return Peak(seconds, max(0, _resident("VmHWM") - before - result_bytes), result_bytes)


def sample(call: Callable, expected_seconds: float) -> tuple[float, int]:
    """Seconds per call, and the number of calls that it is the mean of."""
    repeats = max(1, round(SAMPLE_SECONDS / max(expected_seconds, 1e-7)))
    # Idle threads of an OpenMP pool spin for a few milliseconds before they sleep and would share our cores.
    time.sleep(0.01)
    if expected_seconds < SHORT_CALL_SECONDS:
        call()
    gc.disable()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = (time.perf_counter() - start) / repeats
    gc.enable()
    return seconds, repeats


class OtherLoad:
    """CPU time that everyone else on the machine took since the last `restart`, in cores."""

    def __init__(self):
        self.process = psutil.Process()
        self.restart()

    def restart(self) -> None:
        self.start = self._now()

    def cores(self) -> float:
        busy, own, wall = (now - then for now, then in zip(self._now(), self.start, strict=True))
        return max(0.0, busy - own) / max(wall, 1e-6)

    def _now(self) -> tuple[float, float, float]:
        machine, own = psutil.cpu_times(), self.process.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # Linux counts guest time inside user time already.
        guest = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)
        return sum(machine) - guest - idle, own.user + own.system, time.monotonic()


def _resident(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _trim() -> None:
    """Give freed heap back to the system, so that the call under test cannot reuse it unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
