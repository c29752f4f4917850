"""What the compiler made of one build for one chip."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fla_npu.compiler.bishengir import Outcome
from fla_npu.compiler.count import Device, Loop, Totals, chunk_loop, devices, loops
from fla_npu.compiler.hivm import Module, Op, ParseError
from fla_npu.planner.chips import chip

Split = Literal["held", "lost", "none"]

_SPACES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}


@dataclass(frozen=True)
class ScalarLoop:
    """A vector operation that the compiler turned into a loop over single elements."""

    core: str
    source: str
    elements: int | None
    """Iterations of the loop, inner loops multiplied; None where they are known only at run time."""
    accesses: tuple[str, ...]
    in_chunk_loop: bool


@dataclass(frozen=True)
class Report:
    """Everything that can be said without running: limits, hand-offs, bytes, products, vector work.

    `chunk` is one iteration of the chunk loop, cube and both vector cores together, for a full chunk. It is None where
    there is no such loop, or where the compiler's output has no loops in it any more (A5).
    """

    name: str
    kernel: str
    chip: str
    target: str
    compiler: str
    verdict: str
    needs: tuple[tuple[str, int, int], ...] = ()
    """Memory, bits it would need and bits there are, for those that overflowed."""
    retried: bool = False
    """Multi-buffering was given up to fit."""
    split: Split = "none"
    """Whether both vector cores share the work; `none` where a kernel has no vector part beside a cube part."""
    peak: Mapping[str, int] = field(default_factory=dict)
    limit: Mapping[str, int] = field(default_factory=dict)
    """Bytes used of UB, L1 and L0C, and bytes there are."""
    workspace: int = 0
    """Bytes of global memory per program."""
    syncs: int = 0
    """Cross-core hand-offs in the whole text."""
    chunk: Totals | None = None
    chunk_source: str = ""
    once: Totals | None = None
    """What a program does once, outside loops of unknown length."""
    loops: tuple[Loop, ...] = ()
    scalar_loops: tuple[ScalarLoop, ...] = ()
    unknown_calls: tuple[str, ...] = ()
    """Library functions that the counts do not know."""
    message: str = ""
    """The compiler's own words where it failed."""
    unread: str = ""
    """What in the compiler's program was not understood; there are no figures then."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Why a kernel should not ship so; empty when all is well."""
        return tuple(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.verdict == "overflow":
            for memory, bits, limit in self.needs:
                yield f"{memory} overflow: needs {bits:,} bits of {limit:,}"
        elif self.verdict != "passed":
            yield f"{self.verdict}: {self.message or 'no message'}"
        if self.unread:
            yield f"the compiler's program is not understood: {self.unread}"
        if self.retried and self.verdict == "passed":
            yield "fits only without multi-buffering"
        if self.split == "lost":
            yield "the split over the two vector cores was lost: one of them does all the work"
        for loop in self.scalar_loops:
            if loop.in_chunk_loop:
                yield f"scalar loop over {loop.elements or '?'} elements in the chunk loop at {loop.source or '?'}"
        if self.unknown_calls:
            yield f"calls not counted: {', '.join(self.unknown_calls)}"

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def chunk_syncs(self) -> int | None:
        return None if self.chunk is None else self.chunk.syncs

    def as_dict(self) -> dict[str, Any]:
        record = {
            name: getattr(self, name)
            for name in ("name", "kernel", "chip", "target", "compiler", "verdict", "retried", "split", "workspace")
        }
        return {
            **record,
            "ok": self.ok,
            "problems": list(self.problems),
            "needs_bits": {memory: {"needed": bits, "available": limit} for memory, bits, limit in self.needs},
            "peak_bytes": dict(self.peak),
            "limit_bytes": dict(self.limit),
            "syncs": self.syncs,
            "once": None if self.once is None else self.once.as_dict(),
            "chunk": None if self.chunk is None else {"source": self.chunk_source, **self.chunk.as_dict()},
            "loops": [loop.as_dict() for loop in self.loops],
            "scalar_loops": [asdict(loop) for loop in self.scalar_loops],
            "unknown_calls": list(self.unknown_calls),
            "message": self.message,
            "unread": self.unread,
        }

    def line(self) -> str:
        """The report on one line."""
        head = f"{self.name} on {self.chip}: "
        if self.verdict != "passed":
            return head + "; ".join(self.problems)
        used = ", ".join(f"{memory} {self.peak[memory]:,}/{self.limit.get(memory, 0):,}" for memory in self.peak)
        parts = [used, f"split {self.split}", f"workspace {self.workspace:,} B"]
        if self.chunk is not None:
            parts.append(
                f"a chunk: {self.chunk.syncs} syncs, {self.chunk.user_read:,} B in, {self.chunk.user_written:,} B out, "
                f"{self.chunk.workspace:,} B through the workspace, {self.chunk.macs:,} MACs"
            )
        else:
            parts.append(f"{self.syncs} syncs")
        return head + "; ".join([*parts, *(f"PROBLEM {problem}" for problem in self.problems)])

    def text(self) -> str:
        """The report as a page of text."""
        rows = [f"{self.name} on {self.chip} ({self.target}, {self.compiler}): {self.verdict}"]
        rows += [f"  problem     {problem}" for problem in self.problems]
        if self.verdict != "passed":
            return "\n".join(rows)
        for memory, bytes_ in self.peak.items():
            limit = self.limit.get(memory, 0)
            rows.append(f"  {memory:<12}{bytes_:>12,} of {limit:,} bytes ({bytes_ / max(limit, 1):.0%})")
        rows.append(
            f"  split       {self.split}; workspace {self.workspace:,} bytes a program; {self.syncs} syncs in text"
        )
        if self.chunk is not None:
            rows.append(f"  a full chunk ({self.chunk_source or 'no line'}), both vector cores together")
            rows += [f"    {line}" for line in totals_text(self.chunk)]
        if self.once is not None and self.once.sum("calls"):
            once = self.once
            rows.append(
                f"  once, outside loops of unknown length: {once.user_read:,} B in, {once.user_written:,} B out, "
                f"{once.workspace:,} B workspace, {once.macs:,} MACs, {once.vector_elements:,} vector elements"
            )
        for loop in self.loops:
            inner = ", loops of unknown length inside not counted" if loop.has_inner else ""
            rows.append(
                f"  loop {loop.path:<10}{loop.location:<22} x {loop.trips if loop.trips is not None else '?'}: "
                f"{loop.body.syncs} syncs, {loop.body.macs:,} MACs, {loop.body.vector_elements:,} elements{inner}"
            )
        for scalar in self.scalar_loops:
            place = "in" if scalar.in_chunk_loop else "outside"
            rows.append(f"  scalar loop {scalar.source} over {scalar.elements} elements, {place} the chunk loop")
        return "\n".join(rows)


def table(reports: Iterable[Report]) -> str:
    """Many reports as a table, one line each; quantities are those of a full chunk."""
    heads = ("kernel", "chip", "UB", "L1", "L0C", "split", "syncs", "in B", "out B", "workspace B", "MACs", "result")
    rows: list[tuple[str, ...]] = [heads]
    for report in reports:
        used = [
            f"{report.peak[memory] / report.limit[memory]:.0%}"
            if report.limit.get(memory) and memory in report.peak
            else "-"
            for memory in ("UB", "L1", "L0C")
        ]
        chunk = report.chunk
        figures = (
            [f"{n:,}" for n in (chunk.syncs, chunk.user_read, chunk.user_written, chunk.workspace, chunk.macs)]
            if chunk is not None
            else ["-"] * 5
        )
        result = "; ".join(report.problems) or "ok"
        rows.append((report.name, report.chip, *used, report.split, *figures, result))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads) - 1)]
    left = (0, 1, 5)
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join([*cells, row[-1]]))
    return "\n".join(lines)


def totals_text(totals: Totals) -> list[str]:
    """Quantities as lines of text."""
    rows = [f"{key:<22}{value:>16,} B" for key, value in totals.gm.items()]
    rows += [f"{way:<22}{value:>16,} B" for way, value in totals.by("on_core").items()]
    rows.append(f"{'L1 -> L0':<22}{totals.l1_to_l0:>16,} B")
    rows += [f"{'MACs ' + dtype:<22}{value:>16,}" for dtype, value in totals.by("macs").items()]
    rows.append(f"{'vector elements':<22}{totals.vector_elements:>16,}  {_list(totals.by('vector'))}")
    rows.append(f"{'syncs':<22}{totals.syncs:>16,}  {_list(totals.by('syncs'))}")
    rows.append(f"{'calls':<22}{totals.sum('calls'):>16,}  {_list(totals.by('calls'))}")
    scalar = totals.by("scalar")
    if scalar:
        rows.append(f"{'scalar accesses':<22}{sum(scalar.values()):>16,}  {_list(scalar)}")
    return rows


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in sorted(counts.items(), key=lambda item: -item[1]))


def failed(head: Mapping[str, str], message: str) -> Report:
    """The report of a build that the front end refused; `head` as in `analyse`."""
    return Report(
        name=head["name"],
        kernel=head["kernel"],
        chip=head["chip"],
        target=head["target"],
        compiler=head["compiler"],
        verdict="error",
        message=message,
    )


def unread(outcome: Outcome, head: Mapping[str, str], why: str) -> Report:
    """The report of a program that the counts do not understand."""
    return replace(failed(head, ""), verdict=outcome.verdict, retried=outcome.retried, unread=why)


def analyse(outcome: Outcome, module: Module | None, arguments: tuple[str, ...], head: Mapping[str, str]) -> Report:
    """The report of one run; `head` is its `name`, `kernel`, `chip`, `target` and `compiler`."""
    try:
        return _analyse(outcome, module, arguments, head)
    except ParseError as error:
        return unread(outcome, head, str(error))


def _analyse(outcome: Outcome, module: Module | None, arguments: tuple[str, ...], head: Mapping[str, str]) -> Report:
    common: dict[str, Any] = {**head, "verdict": outcome.verdict, "needs": outcome.needs}
    if module is None:
        return Report(**common, retried=outcome.retried, message=outcome.message)
    target, found = chip(head["chip"]), devices(module, arguments)
    structured = all(device.structured for device in found)
    chunks = {device: chunk_loop(device) for device in found} if structured else {}
    bodies = [device.full(chosen[1].regions[-1])[0] for device, chosen in chunks.items() if chosen is not None]
    source = next((chosen[1].location for chosen in chunks.values() if chosen is not None), "")
    return Report(
        **common,
        retried=outcome.retried,
        split=_split(outcome, found),
        peak=peaks(found),
        limit={"UB": target.ub_bytes, "L1": target.l1_bytes, "L0C": target.l0c_bytes or 0},
        workspace=module.host_value("infer_workspace_shape_function") or 0,
        syncs=sum(1 for d in found for op in d.function.body.walk() if op.name == "hivm.hir.sync_block_set"),
        chunk=_sum(bodies) if bodies else None,
        chunk_source=source,
        once=_sum(device.full(device.function.body)[0] for device in found) if structured else None,
        loops=tuple(loop for device in found for loop in loops(device)) if structured else (),
        scalar_loops=tuple(loop for device, chosen in chunks.items() for loop in _scalar_loops(device, chosen)),
        unknown_calls=tuple(sorted({name for device in found for name in device.unknown})),
    )


def _sum(parts: Iterable[Totals]) -> Totals:
    total = Totals({})
    for part in parts:
        total += part
    return total


def _split(outcome: Outcome, found: "list[Device]") -> Split:
    vector = [device for device in found if device.core == "AIV" and device.mixed]
    if not vector:
        return "none"
    if outcome.split_reverted:
        return "lost"
    for device in vector:
        for op in device.function.body.walk():
            if device.sub_block_zero_only(op) and any("store" in inner.callee for inner in op.regions[0].walk()):
                return "lost"
    used = any(op.name == "hivm.hir.get_sub_block_idx" for d in vector for op in d.function.body.walk())
    stores = any(op.callee.startswith("store_ubuf") for d in vector for op in d.function.body.walk())
    return "held" if used or not stores else "lost"


def peaks(found: "list[Device]") -> dict[str, int]:
    """Highest byte used of each on-core memory, over all device functions."""
    peak: dict[str, int] = {}
    for device in found:
        for op in device.function.body.walk():
            if op.name != "hivm.hir.pointer_cast":
                continue
            buffer = device.buffers[op.results[0]]
            size, name = buffer.full_bytes(), _SPACES.get(buffer.space)
            if name and size is not None and buffer.offset is not None:
                peak[name] = max(peak.get(name, 0), buffer.offset + size)
    return {name: peak[name] for name in ("UB", "L1", "L0C") if name in peak}


def _scalar_loops(device: Device, chunk: tuple[str, Op] | None) -> Iterator[ScalarLoop]:
    inside = set(map(id, chunk[1].regions[-1].walk())) if chunk else set()
    grouped: dict[int, list[Op]] = {}
    loops_of: dict[int, Op] = {}
    for op in device.function.body.walk():
        if op.name not in ("memref.load", "memref.store"):
            continue
        position = 1 if op.name == "memref.store" else 0
        if device.buffers[op.operands[position]].space != "ub":
            continue
        for loop in reversed(op.loops()):
            if loop.name == "scf.for" and _depends(device, op.operands[position + 1 :], loop.regions[0].arguments[0]):
                grouped.setdefault(id(loop), []).append(op)
                loops_of[id(loop)] = loop
                break
    for key, ops in grouped.items():
        loop = loops_of[key]
        elements: int | None = 1
        for around in reversed(ops[0].loops()):
            trips = device.trips(around)
            if chunk is not None and around is chunk[1]:
                break
            if trips is None:
                elements = None if around is loop else elements
                break
            elements = None if elements is None else elements * trips
        source = next((op.location for op in (*ops, loop) if op.location), "")
        accesses = tuple(sorted({f"{op.name.removeprefix('memref.')} {_accessed(device, op)}" for op in ops}))
        yield ScalarLoop(device.core, source, elements, accesses, id(loop) in inside)


def _accessed(device: Device, op: Op) -> str:
    return str(device.buffers[op.operands[op.name == "memref.store"]])


def _depends(device: Device, values: list[str], induction: str) -> bool:
    """Whether one of the values is computed from a loop's induction variable."""
    todo, seen = list(values), set()
    while todo:
        value = todo.pop()
        if value == induction:
            return True
        op = device.buffers.defining(value)
        if op is None or value in seen or op.regions:
            continue
        seen.add(value)
        todo += op.operands
    return False
