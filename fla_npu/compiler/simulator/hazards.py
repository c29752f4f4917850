"""Accesses that nothing orders: the pipes of a core run side by side, and only flags and barriers order them.

Each pipe of each core has a vector clock. An access is a hazard if an earlier one to the same bytes, one of the two a
write, came from a pipe whose clock at that access the accessing pipe has not seen through flags. Inside most pipes an
instruction may also start before the last one is done: what a pipe has seen of itself is what was issued before its
last barrier, or came back to it through flags.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fla_npu.compiler.simulator.library import Instruction
from fla_npu.compiler.simulator.memory import Memory, View, touched

PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
CORES = ("AIC", "AIV0", "AIV1")
_LANES = len(PIPES) * len(CORES)

_IN_ORDER = ("S", "M", "MTE1")
"""Pipes in which each instruction sees the ones before: the scalar unit, and the two that the library's matrix product
orders itself."""

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
        """Pipe -> its clock and instruction at its last read."""

    def late(self, where: Any, seen: Clock) -> Any:
        """Where the last write is not among what has been seen."""
        return self.write_clock[where] > seen[self.write_lane[where]]

    def read(self, lane: int, clock: int, label: int, where: Any) -> None:
        if lane not in self.reads:
            self.reads[lane] = (np.zeros(self.size, np.int64), np.zeros(self.size, np.int32))
        clocks, labels = self.reads[lane]
        clocks[where] = clock
        labels[where] = label

    def write(self, lane: int, clock: int, label: int, where: Any) -> None:
        self.write_lane[where] = lane
        self.write_clock[where] = clock
        self.write_label[where] = label


class Hazards:
    """Clocks and accesses of one launch. All programs of a launch run at once, so nothing orders two of them."""

    def __init__(self, programs: int) -> None:
        # One more entry, always zero, is the clock of the writer of memory that nobody has written yet.
        self.clocks = np.zeros((programs * _LANES, programs * _LANES + 1), np.int64)
        self.shadows: dict[Memory, _Shadow] = {}
        self.found: dict[tuple[str, int, int], Hazard] = {}
        self.labels: dict[str, int] = {}
        self.names: list[str] = []
        self.settled = np.zeros(programs * _LANES, np.int64)
        """Clock up to which each pipe knows that its own instructions are done."""

    @staticmethod
    def lane(program: int, core: str, pipe: str) -> int:
        return program * _LANES + CORES.index(core) * len(PIPES) + PIPES.index(pipe)

    def issue(self, lane: int, scalar: int) -> Clock:
        """The clock of a pipe as it takes an instruction, which the scalar pipe hands to it."""
        if lane != scalar:
            self.join(lane, self.clocks[scalar])
        clock: Clock = self.clocks[lane]
        return clock

    def token(self, lane: int, scalar: int) -> Clock:
        """What somebody knows who waits for all that a pipe has taken so far."""
        return self.issue(lane, scalar).copy()

    def join(self, lane: int, token: Clock) -> None:
        """A pipe learns what a token says."""
        np.maximum(self.clocks[lane], token, out=self.clocks[lane])
        self.settled[lane] = max(self.settled[lane], token[lane])

    def barrier(self, lanes: list[int]) -> None:
        """All that these pipes of a core have taken is done before any of them goes on."""
        self.clocks[lanes] = self.clocks[lanes].max(axis=0)
        self.settled[lanes] = self.clocks[lanes, lanes]

    def access(self, lane: int, scalar: int, step: Instruction, label: str) -> None:
        """One instruction of a pipe, and the scalar pipe that has handed it out."""
        clock = self.issue(lane, scalar)
        number = self.labels.setdefault(label, len(self.labels))
        if number == len(self.names):
            self.names.append(label)
        seen = clock.copy()
        if step.pipe not in _IN_ORDER:
            seen[lane] = self.settled[lane]
        read, written, scratch = (self._places(views) for views in (step.reads, step.writes, step.scratch))
        for shadow, view, where in read:
            self._check("read after write", shadow.late(where, seen), shadow.write_label, view, where, number)
        for places, known in ((written, seen), (scratch, clock)):
            for shadow, view, where in places:
                if not step.same:
                    self._check("write twice", shadow.late(where, known), shadow.write_label, view, where, number)
                for other, (clocks, labels) in shadow.reads.items():
                    self._check("write after read", clocks[where] > known[other], labels, view, where, number)
        clock[lane] += 1
        for shadow, _, where in read:
            shadow.read(lane, int(clock[lane]), number, where)
        for shadow, _, where in (*written, *scratch):
            shadow.write(lane, int(clock[lane]), number, where)

    def _places(self, views: list[View]) -> list[tuple[_Shadow, View, Any]]:
        places = []
        for view in views:
            where = touched(view)
            if where is not None:
                if view.memory not in self.shadows:
                    self.shadows[view.memory] = _Shadow(view.memory)
                places.append((self.shadows[view.memory], view, where))
        return places

    def _check(self, kind: str, late: Any, labels: Any, view: View, where: Any, number: int) -> None:
        if not late.any():
            return
        places = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        place = int(places[np.flatnonzero(late)[0]])
        first = int(labels[place])
        self.found.setdefault(
            (kind, first, number),
            Hazard(kind, view.memory.name, place * view.memory.granule, self.names[first], self.names[number]),
        )
