"""Seconds of the chunked ops on the NPU of this machine, for `tune` and `benchmarks/sweep.py`. Imports triton."""

from collections.abc import Callable
from typing import Any

import torch

from fla_npu.ops.common.ascend import chip_name, core_count
from fla_npu.ops.common.configs import Config
from fla_npu.ops.common.launch import launch_chunks
from fla_npu.ops.common.trial import expected, judge, make_call
from fla_npu.ops.common.tune import LENGTHS, LOADS, Failed, Key

SAMPLE_SECONDS = 0.01
"""Calls are repeated until a sample takes about so long: events resolve microseconds."""

CHECKED_TOKENS = 161
"""Length of the call that is compared with the recurrence: some chunks of any size, and a tail."""

_UNITS = {"quarter": 0.25, "half": 0.5, "one": 0.75, "some": 2.25, "many": 8.0}
_TOKENS = {"16": 16, "32": 32, "long": 2048}
assert _UNITS.keys() == LOADS.keys() and _TOKENS.keys() == LENGTHS.keys()


def device() -> tuple[str, int] | None:
    """Name and cores of the NPU; None without one."""
    name = chip_name()
    return None if name is None else (name, core_count(torch.device("npu")))


def for_key(key: Key, dtype: str, cores: int) -> Callable[[Config], float] | None:
    """The timer of a key, on a call that stands for its class; None where the key's chip is not this machine's."""
    name = chip_name()
    if name is None or name.upper() != key.chip.upper():
        return None
    return timer(
        key.op,
        K=key.K,
        V=key.V,
        dtype=dtype,
        fast=key.precision == "fast",
        heads=max(1, round(_UNITS[key.load] * cores)),
        tokens=_TOKENS[key.length],
        cores=cores,
    )


def timer(
    op: str,
    *,
    K: int,
    V: int,
    dtype: str,
    fast: bool,
    heads: int,
    tokens: int,
    cores: int,
    lower_bound: float | None = -5.0,
    device: str = "npu",
    clock: Callable[[Callable[[], Any], int], float] | None = None,
) -> Callable[[Config], float]:
    """A function that measures a configuration; its first call with one compiles it and checks what it computes.

    Args:
        op, K, V, dtype, fast, heads, tokens, lower_bound: of the call, see `make_call`.
        cores: programs of a launch.
        clock: seconds per call of a function that is called so many times; `seconds_of` by default.
    """
    clock = clock or seconds_of
    kind: dict[str, Any] = {"K": K, "V": V, "dtype": dtype, "lower_bound": lower_bound, "device": device}
    small, options = make_call(op, tokens=CHECKED_TOKENS, **kind)
    right = expected(small, options)
    large, _ = make_call(op, tokens=tokens, heads=heads, **kind)
    repeats: dict[Config, int] = {}

    def measure(config: Config) -> float:
        def call() -> Any:
            return launch_chunks(large, options, config, fast=fast, cores=cores)

        if config not in repeats:
            try:
                trial = judge(launch_chunks(small, options, config, fast=fast, cores=cores), right, dtype, fast)
                call()
                seconds = clock(call, 1)
            except Exception as error:  # compilers and drivers raise whatever they like
                raise Failed(f"{config} does not run: {error}") from error
            if not trial.right:
                raise Failed(f"{config} is wrong: {trial}")
            repeats[config] = max(1, min(1000, round(SAMPLE_SECONDS / max(seconds, 1e-6))))
        call()
        return clock(call, repeats[config])

    return measure


def seconds_of(call: Callable[[], Any], repeats: int, module: Any = None) -> float:
    """Seconds per call on the device, between two events around so many calls.

    Args:
        module: what has `Event` and `synchronize`; `torch.npu` by default.
    """
    module = module or getattr(torch, "npu")  # noqa: B009 torch_npu adds it
    start, stop = module.Event(enable_timing=True), module.Event(enable_timing=True)
    module.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    module.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3 / repeats
