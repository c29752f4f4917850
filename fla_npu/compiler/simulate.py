"""Running the vendor compiler's final program on a CPU, one launch on numpy arrays.

Memories are bytes, buffers lie where the compiler has put them, and every byte that was not written reads as NaN. The
cube core and the two vector cores of a program run in turns and meet at their cross-core flags, in an order that can
be chosen. A second check finds accesses that neither a flag nor a barrier orders, although in this run they came in
the right order.

It is a model of programs for A2 and A3, made from the public sources of the library that the programs call. It says
nothing about speed, about rounding inside a matrix product or an exponential, and nothing about bugs of the chip.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fla_npu.compiler import hivm
from fla_npu.compiler.buffers import FIXED_ARGUMENTS
from fla_npu.compiler.hivm import Function, Module
from fla_npu.compiler.simulator.hazards import Hazard, Hazards
from fla_npu.compiler.simulator.machine import Code, Core, Flags, Launch, dense
from fla_npu.compiler.simulator.memory import NUMPY, Array, Memory, SimulationError, View

__all__ = ["Hazard", "HazardError", "SimulationError", "Statistics", "simulate"]


@dataclass(frozen=True)
class Statistics:
    """What a launch did.

    Args:
        calls: library function -> how often it was called, all cores together.
        most_pending: most signals of one cross-core flag that waited at one time.
        hazards: accesses that nothing orders, each pair of instructions once.
    """

    calls: Counter[str]
    most_pending: int
    hazards: tuple[Hazard, ...]


class HazardError(SimulationError):
    """Some accesses are not ordered; the arrays hold the result of this run's order."""

    def __init__(self, statistics: Statistics) -> None:
        found = statistics.hazards
        listed = [str(hazard) for hazard in found[:20]] + ["..."] * (len(found) > 20)
        super().__init__("\n".join([f"{len(found)} pairs of accesses that nothing orders:", *listed]))
        self.statistics = statistics


def simulate(
    module: str | Module,
    arguments: Sequence[Any],
    grid: int | Sequence[int],
    schedule: str = "round_robin",
    check_hazards: bool = True,
) -> Statistics:
    """Runs a launch; arrays that the kernel writes to are changed.

    Args:
        module: the text of `module.hivm.opt.mlir`, or the module that `hivm.parse` made of it.
        arguments: the kernel's run-time arguments in its order, a contiguous numpy array for each pointer and a number
            for each scalar. numpy has no bf16: such arrays are `uint16` with its bits.
        grid: programs, one number or up to three.
        schedule: `round_robin` changes the core after each instruction, `aic_first` and `aiv_first` only when the core
            has to wait, `random:<seed>` at random.
        check_hazards: look for accesses that nothing orders.

    Raises:
        SimulationError: the program does what a device can not do, reads outside an array, or its cores wait for each
            other for ever.
        HazardError: `check_hazards` has found something.
        ValueError: an argument does not fit.
    """
    parsed = hivm.parse(module) if isinstance(module, str) else module
    sizes = (grid,) if isinstance(grid, int) else tuple(grid)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise ValueError(f"grid must be one to three positive numbers, got {grid!r}")
    order = _order(schedule)
    programs = int(np.prod(sizes))
    hazards = Hazards(programs) if check_hazards else None
    bits = {"ub": "UB_SIZE", "cbuf": "L1_SIZE", "cc": "L0C_SIZE"}
    if any(name not in parsed.limits for name in bits.values()):
        raise ValueError("module must say how large UB, L1 and L0C are")
    launch = Launch(
        parsed.maps,
        (*sizes, 1, 1)[:3],  # type: ignore[arg-type]
        {space: parsed.limits[name] // 8 for space, name in bits.items()},
        hazards,
    )
    functions = parsed.kernels()
    if not functions:
        raise ValueError("module must have a function that runs on the device")
    codes = [Code(launch, function) for function in functions]
    workspace = Memory.empty(
        "workspace", (parsed.host_value("infer_workspace_shape_function") or 0) * programs, "gm", 4
    )
    memories = _memories(functions[0], arguments)
    most = 0
    for program in range(programs):
        flags = Flags()
        cores = []
        for code in codes:
            values = _values(code.function, arguments, memories, workspace, launch.grid)
            if code.function.core == "AIC":
                cores.append(Core(launch, code, "AIC", program, 0, values, flags))
            else:
                # Without a cube function the launch is on single vector cores.
                for sub_block in range(len(codes)):
                    cores.append(Core(launch, code, f"AIV{sub_block}", program, sub_block, values, flags))
        _run(cores, order)
        left = flags.left()
        if left:
            raise SimulationError(f"program {program} leaves cross-core flags set: {'; '.join(left)}")
        most = max(most, flags.most)
    statistics = Statistics(launch.calls, most, tuple(hazards.found.values()) if hazards else ())
    if statistics.hazards:
        raise HazardError(statistics)
    return statistics


def _order(schedule: str) -> "random.Random | str":
    kind, _, seed = schedule.partition(":")
    if kind == "random" and seed.isdigit():
        return random.Random(int(seed))
    if schedule not in ("round_robin", "aic_first", "aiv_first"):
        raise ValueError(f"schedule must be round_robin, aic_first, aiv_first or random:<seed>, got {schedule!r}")
    return schedule


def _run(cores: list[Core], order: "random.Random | str") -> None:
    """Runs the cores of one program to their ends."""
    if order == "aiv_first":
        cores = sorted(cores, key=lambda core: core.name, reverse=True)
    running: dict[Core, Iterator[bool]] = {core: core.run() for core in cores}
    waiting: set[Core] = set()
    turn = 0
    while running:
        ready = [core for core in running if core not in waiting]
        if not ready:
            places = "; ".join(core.place() for core in running)
            raise SimulationError(f"the cores wait for each other: {places}")
        if isinstance(order, random.Random):
            core = order.choice(ready)
        elif order == "round_robin":
            core = ready[turn % len(ready)]
            turn += 1
        else:
            core = ready[0]
        try:
            went_on = next(running[core])
        except StopIteration:
            del running[core]
            waiting.clear()
            continue
        if went_on:
            waiting.clear()
        else:
            waiting.add(core)


def _memories(function: Function, arguments: Sequence[Any]) -> list[Memory | None]:
    """The kernel's arrays as memories, None for its scalars."""
    kinds = [kind for _, kind in function.arguments[FIXED_ARGUMENTS:-3]]
    if len(arguments) != len(kinds):
        raise ValueError(f"arguments must be {len(kinds)}, got {len(arguments)}")
    found: list[Memory | None] = []
    for number, (kind, argument) in enumerate(zip(kinds, arguments, strict=True)):
        if not kind.startswith("memref"):
            if isinstance(argument, np.ndarray):
                raise ValueError(f"arguments[{number}] must be a number for {kind}, got an array")
            found.append(None)
            continue
        dtype = hivm.memrefs(kind)[0].dtype
        if dtype not in NUMPY:
            raise ValueError(f"arguments[{number}] has a type that is not understood: {kind}")
        if not isinstance(argument, np.ndarray) or argument.dtype != NUMPY[dtype] or not argument.flags.c_contiguous:
            got = argument.dtype if isinstance(argument, np.ndarray) else type(argument).__name__
            raise ValueError(
                f"arguments[{number}] must be a contiguous array of {np.dtype(NUMPY[dtype])} for {dtype}, got {got}"
            )
        bytes_: Array = argument.reshape(-1).view(np.uint8)
        found.append(Memory(f"arguments[{number}]", bytes_, "gm", argument.itemsize))
    return found


def _values(
    function: Function,
    arguments: Sequence[Any],
    memories: Sequence[Memory | None],
    workspace: Memory,
    grid: tuple[int, int, int],
) -> dict[str, Any]:
    """The values of a function's arguments."""
    names = [value for value, _ in function.arguments]
    count = len(names) - 3
    values: dict[str, Any] = dict(zip(names[count:], grid, strict=True))
    values[names[0]] = 0
    values[names[2]] = View(workspace, 0, 0, (workspace.data.size,), (1,), "i8")
    for value, kind, argument, memory in zip(
        names[FIXED_ARGUMENTS:count],
        [kind for _, kind in function.arguments[FIXED_ARGUMENTS:count]],
        arguments,
        memories,
        strict=True,
    ):
        if memory is None:
            values[value] = float(np.float32(argument)) if kind.startswith("f") else int(argument)
        else:
            dtype = hivm.memrefs(kind)[0].dtype
            shape = (memory.data.size // memory.granule,)
            values[value] = View(memory, 0, 0, shape, dense(shape), dtype)
    return values
