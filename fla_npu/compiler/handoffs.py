"""Which values a chunk's cross-core hand-offs carry: who makes each, through which buffer, and who reads it.

On A2 and A3 a tile goes through the workspace in global memory, on A5 straight from L0C to UB or from UB to L1.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fla_npu.compiler.buffers import Buffer
from fla_npu.compiler.count import Device, chunk_loop, destination, devices, family, terms
from fla_npu.compiler.hivm import Module, Op

_READERS = ("nd2nz", "load_gm_to_")
_WRITERS = ("fixpipe", "store_ubuf_to_gm", "copy_ubuf_to_cbuf")

Place = tuple[str, "int | str | None"]


@dataclass(frozen=True)
class Transfer:
    """One tile that changes sides. On A2 and A3 shapes are those of the whole tile, both vector cores together."""

    tile: str
    bytes: int | None
    memory: str
    """`workspace`, or for A5 `ub` and `cbuf` (L1)."""
    offset: int | None
    """Bytes from the start of that memory."""
    producer: str
    producer_line: str
    consumers: tuple[str, ...]
    consumer_lines: tuple[str, ...]
    again: bool
    """The same value was already stored in the workspace in this chunk."""


@dataclass(frozen=True)
class HandOff:
    """One `sync_block_set` in the chunk loop, with the tiles written since the one before."""

    direction: str
    """`cube -> vector`, `vector -> cube`, or for a round trip that needs no sync `cube -> cube`."""
    kind: str
    """`data`, `slot` (a buffer is free again), `scalar` (a handshake around a scalar), `none` (no sync)."""
    pipe: str
    flag: str
    line: str
    transfers: tuple[Transfer, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        head = f"{self.direction:<16}{self.kind:<7}"
        if not self.transfers:
            return f"{head}{'':<60}{self.line}".rstrip()
        rows = []
        for transfer in self.transfers:
            lines = ",".join(dict.fromkeys(line.rsplit(":", 1)[-1] for line in transfer.consumer_lines if line))
            rows.append(
                f"{head}{transfer.tile:<14}{transfer.bytes or 0:>8} B  {transfer.producer:<28} "
                f"{transfer.producer_line:<24} -> {', '.join(transfer.consumers) or 'nobody in this loop'}"
                f"{f' (line {lines})' if lines else ''}{'  STORED AGAIN' if transfer.again else ''}"
            )
            head = " " * len(head)
        return "\n".join(rows)


def explain_syncs(module: Module, arguments: Iterable[str] = ()) -> tuple[HandOff, ...]:
    """The hand-offs of the chunk loop, in the order of the producing core's text, cube first.

    Also lists tiles that the cube writes to the workspace and reads back itself: they cost traffic but no sync.
    """
    sides = [_Side(device) for device in devices(module, arguments)]
    found: list[HandOff] = []
    for side in sides:
        found += side.hand_offs(sides)
    return tuple(found)


def table(hand_offs: Iterable[HandOff]) -> str:
    """The hand-offs as text, one tile a line, with the sums below."""
    listed = list(hand_offs)
    syncs = [hand_off for hand_off in listed if hand_off.kind != "none"]
    tiles = [transfer for hand_off in listed for transfer in hand_off.transfers]
    again = sum(transfer.again for transfer in tiles)
    total = sum(transfer.bytes or 0 for transfer in tiles)
    summary = f"{len(syncs)} syncs, {len(tiles)} tiles of {total:,} B, {again} stored again"
    return "\n".join([*(str(hand_off) for hand_off in listed), summary])


class _Side:
    """One core's chunk loop as a straight line of operations."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.name = "cube" if device.core == "AIC" else "vector"
        chosen = chunk_loop(device)
        self.ops = list(chosen[1].regions[-1].walk()) if chosen else list(device.function.body.walk())
        self._written: set[tuple[Any, ...]] = set()
        self._readers = self._find_readers()

    def hand_offs(self, sides: "list[_Side]") -> list[HandOff]:
        found: list[HandOff] = []
        pending: list[tuple[int, Op]] = []
        others = [side for side in sides if side is not self]
        for position, op in enumerate(self.ops):
            if self._medium(op) is not None:
                pending.append((position, op))
            if op.name != "hivm.hir.sync_block_set":
                continue
            pipe, flag = self._event(op)
            data = [(at, write) for at, write in pending if not self._reread(write)] if pipe in ("FIX", "MTE3") else []
            transfers = tuple(self._transfer(at, write, others) for at, write in data)
            pending = [entry for entry in pending if entry not in data]
            kind = "scalar" if pipe == "S" else "data" if transfers else "slot"
            target = others[0].name if others else self.name
            found.append(HandOff(f"{self.name} -> {target}", kind, pipe, flag, op.location, transfers))
        for at, write in pending:
            if self._reread(write):
                transfers = (self._transfer(at, write, [self]),)
                found.append(HandOff(f"{self.name} -> {self.name}", "none", "", "", write.location, transfers))
        return found

    @staticmethod
    def _event(op: Op) -> tuple[str, str]:
        pipe = re.search(r"\[<\w+>, <PIPE_(\w+)>", op.text)
        flag = re.search(r"flag = (\S+)", op.text)
        return pipe.group(1) if pipe else "ALL", flag.group(1) if flag else ""

    def _medium(self, op: Op) -> Place | None:
        """Where a write leaves a tile for the other side, None for other operations."""
        if op.name != "func.call" or not op.callee.startswith(_WRITERS):
            return None
        place = self._place(op.operands[1])
        return None if place[0] == "gm" else place

    def _find_readers(self) -> dict[Place, list[int]]:
        """Positions of the operations that take a tile from where the other side may have left it."""
        found: dict[Place, list[int]] = {}
        for position, op in enumerate(self.ops):
            if op.name != "func.call" or op.callee.startswith(_WRITERS):
                continue
            sources = op.operands[:1] if op.callee.startswith(_READERS) else op.operands
            for value in sources:
                if value in self.device.buffers.of:
                    places = found.setdefault(self._place(value), [])
                    if not places or places[-1] != position:
                        places.append(position)
        return found

    def _reads(self, place: Place) -> list[int]:
        positions = self._readers.get(place, [])
        # On the core the first use is the one that waits; through memory every read is a transfer of its own.
        return positions if place[0] == "workspace" else positions[:1]

    def _reread(self, write: Op) -> bool:
        place = self._medium(write)
        return place is not None and place[0] == "workspace" and bool(self._reads(place))

    def _transfer(self, position: int, write: Op, readers: "list[_Side]") -> Transfer:
        view = self._view(write.operands[1])
        source = self._writer(position, write.operands[0])
        value = self._value(position, write.operands[0])
        # On A5 vector functions write in place, so that what a buffer holds cannot be told from where it is.
        again = self._place(write.operands[1])[0] == "workspace" and value is not None and value in self._written
        if value is not None:
            self._written.add(value)
        place = self._place(write.operands[1])
        consumers: list[tuple[str, str]] = []
        for reader in readers:
            consumers += [reader.consumer(at) for at in reader._reads(place)]
        return Transfer(
            tile=str(view),
            bytes=view.full_bytes(),
            memory=place[0],
            offset=view.offset,
            producer=self.describe(source) if source else "before the loop",
            producer_line=source.location if source else "",
            consumers=tuple(name for name, _ in consumers),
            consumer_lines=tuple(line for _, line in consumers),
            again=again,
        )

    def _view(self, value: str) -> Buffer:
        """The whole workspace buffer that a slice belongs to."""
        op = self.device.buffers.defining(value)
        while op is not None and op.name.startswith("memref.") and op.name != "memref.view":
            value = op.operands[0]
            op = self.device.buffers.defining(value)
        return self.device.buffers[value]

    def _place(self, value: str) -> Place:
        """Memory and start of the buffer that a view is a part of: two buffers at one place are the same memory."""
        buffer = self.device.buffers[value]
        if buffer.root == "workspace":
            return "workspace", buffer.offset
        root = self.device.buffers.of.get(buffer.root, buffer)
        return buffer.space, buffer.root if root.offset is None else root.offset

    def _writer(self, position: int, value: str) -> Op | None:
        """The nearest earlier operation that wrote an on-core buffer."""
        place = self._place(value)
        for op in reversed(self.ops[:position]):
            if op.name != "func.call":
                continue
            written = op.operands if op.callee in self.device.vectors else [self._target(op)]
            if any(value in self.device.buffers.of and self._place(value) == place for value in written if value):
                return op
        return None

    def _target(self, op: Op) -> str | None:
        """The on-core buffer that a call writes."""
        name = op.callee
        if name.startswith(_WRITERS):
            return None
        if name.startswith("mma_tile"):
            return op.operands[6]
        if name.startswith(_READERS):
            return op.operands[1]
        position = destination(op)
        return None if position is None or position >= len(op.operands) else op.operands[position]

    def _value(self, position: int, value: str) -> tuple[Any, ...] | None:
        """Identity of what a buffer holds: two casts of one value are the same value."""
        op = self._writer(position, value)
        if op is None:
            return ("before", *self._place(value))
        at = self.ops.index(op)
        if op.callee.startswith("vcast"):
            inner = self._value(at, op.operands[0])
            return None if inner is None else (op.callee, *inner)
        return (at,)

    def describe(self, op: Op) -> str:
        """A call in a few words."""
        if op.callee.startswith("mma_tile"):
            sizes = next(
                term.full for term in terms(op, self.device.buffers, self.device.core) if term.key[0] == "macs"
            )
            flags = "".join(re.findall(r"_t[ab](?=_|$)", op.callee))
            return f"dot{flags} {'x'.join('?' if size is None else str(size) for size in sizes)}"
        return "vector code" if op.callee in self.device.vectors else family(op.callee)

    def consumer(self, position: int) -> tuple[str, str]:
        """Who first uses what a read brought on the core, and its source line."""
        op = self.ops[position]
        if not op.callee.startswith(_READERS):
            return self.describe(op), op.location
        place = self._place(op.operands[1])
        for later in self.ops[position + 1 :]:
            if later.name != "func.call":
                continue
            target = self._target(later)
            for number, operand in enumerate(later.operands):
                if operand == target or operand not in self.device.buffers.of or self._place(operand) != place:
                    continue
                side = f" {'ab'[number]}" if later.callee.startswith("mma_tile") else ""
                return f"{self.describe(later)}{side}", later.location
        return family(op.callee), op.location
