"""Accesses that nothing orders: the pipes of a core run side by side, and only flags and barriers order them.

Each pipe of each core has a vector clock. An access is a hazard if an earlier one to the same bytes, one of the two a
write, came from a pipe whose clock at that access the accessing pipe has not seen through flags.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fla_npu.compiler.simulator.memory import Memory, View, touched

PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
CORES = ("AIC", "AIV0", "AIV1")
_LANES = len(PIPES) * len(CORES)

Clock = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Hazard:
    """Two unordered accesses. `kind` names them in program order: read after write, write after read or write twice."""

    kind: str
    memory: str
    byte: int
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.kind} at byte {self.byte} of {self.memory}: {self.second} does not wait for {self.first}"


class _Shadow:
    """The last accesses to one memory."""

    def __init__(self, memory: Memory) -> None:
        self.size = -(-memory.data.size // memory.granule)
        self.write_lane = np.full(self.size, -1, np.int32)
        self.write_clock = np.zeros(self.size, np.int64)
        self.write_label = np.zeros(self.size, np.int32)
        self.reads: dict[int, tuple[Clock, npt.NDArray[np.int32]]] = {}


class Hazards:
    """Clocks and accesses of one launch. All programs of a launch run at once, so nothing orders two of them."""

    def __init__(self, programs: int) -> None:
        # One more entry, always zero, is the clock of the writer of memory that nobody has written yet.
        self.clocks = np.zeros((programs * _LANES, programs * _LANES + 1), np.int64)
        self.shadows: dict[Memory, _Shadow] = {}
        self.found: dict[tuple[str, int, int], Hazard] = {}
        self.labels: dict[str, int] = {}
        self.names: list[str] = []

    @staticmethod
    def lane(program: int, core: str, pipe: str) -> int:
        return program * _LANES + CORES.index(core) * len(PIPES) + PIPES.index(pipe)

    def issue(self, lane: int, scalar: int) -> Clock:
        """The clock of a pipe as it takes an instruction, which the scalar pipe hands to it."""
        clock: Clock = self.clocks[lane]
        np.maximum(clock, self.clocks[scalar], out=clock)
        return clock

    def token(self, lane: int, scalar: int) -> Clock:
        """What somebody knows who waits for all that a pipe has taken so far."""
        return self.issue(lane, scalar).copy()

    def join(self, lane: int, token: Clock) -> None:
        np.maximum(self.clocks[lane], token, out=self.clocks[lane])

    def barrier(self, lanes: list[int]) -> None:
        """All pipes of a core finish before any of them goes on."""
        self.clocks[lanes] = self.clocks[lanes].max(axis=0)

    def access(
        self, lane: int, scalar: int, reads: list[View], writes: list[View], label: str, same: bool = False
    ) -> None:
        """One instruction. `same` says that it changes nothing of what it writes."""
        clock = self.issue(lane, scalar)
        clock[lane] += 1
        number = self.labels.setdefault(label, len(self.labels))
        if number == len(self.names):
            self.names.append(label)
        for view in reads:
            self._read(lane, clock, view, number)
        for view in writes:
            self._write(lane, clock, view, number, same)

    def _read(self, lane: int, clock: Clock, view: View, number: int) -> None:
        where = touched(view)
        if where is None:
            return
        shadow = self._shadow(view.memory)
        self._check(
            "read after write", shadow.write_clock[where] > clock[shadow.write_lane[where]], view, number, where
        )
        if lane not in shadow.reads:
            shadow.reads[lane] = (np.zeros(shadow.size, np.int64), np.zeros(shadow.size, np.int32))
        clocks, labels = shadow.reads[lane]
        clocks[where] = clock[lane]
        labels[where] = number

    def _write(self, lane: int, clock: Clock, view: View, number: int, same: bool) -> None:
        where = touched(view)
        if where is None:
            return
        shadow = self._shadow(view.memory)
        if not same:
            self._check("write twice", shadow.write_clock[where] > clock[shadow.write_lane[where]], view, number, where)
        for other, (clocks, labels) in shadow.reads.items():
            if other != lane:
                late = clocks[where] > clock[other]
                self._check("write after read", late, view, number, where, labels)
        shadow.write_lane[where] = lane
        shadow.write_clock[where] = clock[lane]
        shadow.write_label[where] = number

    def _shadow(self, memory: Memory) -> _Shadow:
        if memory not in self.shadows:
            self.shadows[memory] = _Shadow(memory)
        return self.shadows[memory]

    def _check(self, kind: str, late: Any, view: View, number: int, where: Any, labels: Any = None) -> None:
        if not late.any():
            return
        shadow = self.shadows[view.memory]
        places = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        place = int(places[np.flatnonzero(late)[0]])
        first = int((shadow.write_label if labels is None else labels)[place])
        self.found.setdefault(
            (kind, first, number),
            Hazard(kind, view.memory.name, place * view.memory.granule, self.names[first], self.names[number]),
        )
