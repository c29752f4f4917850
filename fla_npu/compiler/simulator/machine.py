"""The cores of one program: each runs its function as a coroutine that stops where another core may take over."""

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fla_npu.compiler.affine import AffineMap
from fla_npu.compiler.hivm import Block, Function, Op
from fla_npu.compiler.simulator import library, scalar
from fla_npu.compiler.simulator.hazards import PIPES, Clock, Hazards
from fla_npu.compiler.simulator.library import Instruction, Step
from fla_npu.compiler.simulator.memory import Memory, SimulationError, View

Values = dict[str, Any]
Run = Generator[bool, None, None]
"""Yields after each instruction whether the core went on; False is a wait for another core."""

MOST_PENDING = 15
"""A cross-core flag counts to here."""


@dataclass
class Flags:
    """Signals between the cores of one program: what each core was sent and has not yet waited for."""

    inbox: dict[tuple[str, str, int], deque[Clock | None]] = field(default_factory=dict)
    """(receiver, sender, flag) -> signals in order, each with what its sender knew."""
    most: int = 0

    def send(self, receiver: str, sender: str, flag: int, token: Clock | None) -> None:
        queue = self.inbox.setdefault((receiver, sender, flag), deque())
        queue.append(token)
        self.most = max(self.most, len(queue))
        if len(queue) > MOST_PENDING:
            raise SimulationError(f"flag {flag} from {sender} to {receiver} was set {len(queue)} times without a wait")

    def take(self, receiver: str, senders: Sequence[str], flag: int) -> list[Clock | None] | None:
        """One signal of every sender, None while one is missing."""
        queues = [self.inbox.get((receiver, sender, flag)) for sender in senders]
        if not all(queues):
            return None
        return [queue.popleft() for queue in queues if queue]

    def left(self) -> list[str]:
        return [
            f"flag {flag} from {sender} to {receiver}: {len(queue)} signals"
            for (receiver, sender, flag), queue in self.inbox.items()
            if queue
        ]


@dataclass
class Launch:
    """What all programs of a launch share."""

    maps: dict[str, AffineMap]
    grid: tuple[int, int, int]
    memories: dict[str, int]
    """Bytes of UB, L1 and L0C."""
    hazards: Hazards | None
    calls: Counter[str] = field(default_factory=Counter)


class Core:
    """One core with its memories and pipes, running one function."""

    def __init__(
        self, launch: Launch, code: "Code", name: str, program: int, sub_block: int, arguments: Values, flags: Flags
    ) -> None:
        self.launch, self.code, self.name, self.program, self.sub_block = launch, code, name, program, sub_block
        self.flags = flags
        self.peers = ("AIC",) if name != "AIC" else ("AIV0", "AIV1")
        self.values: Values = dict(arguments)
        self.memories = {
            space: Memory.empty(f"{label} of {name} {program}", launch.memories[space], space, 32)
            for space, label in (("ub", "UB"), ("cbuf", "L1"), ("cc", "L0C"))
            if (space == "ub") == (name != "AIC")
        }
        self.events: dict[tuple[str, str, int], deque[Clock | None]] = {}
        self.unit: dict[tuple[str, str], Clock | None] = {}
        self.at: Op | None = None
        hazards = launch.hazards
        self.lanes = {pipe: hazards.lane(program, name, pipe) for pipe in PIPES} if hazards else {}

    def run(self) -> Run:
        """Runs the function from start to end."""
        try:
            yield from self.block(self.code.function.body)
        except SimulationError as error:
            raise self.located(error) from None
        left = [f"{a} -> {b}, event {number}" for (a, b, number), tokens in self.events.items() if tokens]
        if left:
            raise SimulationError(f"{self.who}: flags set and never waited for: {'; '.join(left)}")

    @property
    def who(self) -> str:
        return f"{self.name} of program {self.program}"

    def place(self) -> str:
        """Where the core is."""
        return f"{self.who} at {describe(self.at)}" if self.at is not None else f"{self.who} at its start"

    def located(self, error: Exception) -> SimulationError:
        return SimulationError(f"{self.place()}: {error}")

    def block(self, block: Block) -> Run:
        """Runs a block up to its terminator, whose values are left in `self.values["yield"]`."""
        for op, step in self.code.steps(block):
            if step is None:
                yield from self.region(op)
                continue
            self.at = op
            result = step(self)
            if result is not None:
                while not result():
                    yield False
                yield True

    def region(self, op: Op) -> Run:
        values = self.values
        if op.name == "scf.for":
            return self.loop(op)
        if op.name == "scf.if":
            return self.branch(op, bool(values[op.operands[0]]))
        if op.name == "scf.while":
            return self.loop_while(op)
        raise SimulationError(f"operation not understood: {op.name}")

    def loop(self, op: Op) -> Run:
        values, body = self.values, op.regions[0]
        index, stop, step = (values[value] for value in op.operands[:3])
        if step <= 0:
            raise SimulationError(f"step of a loop is {step}")
        carried = [values[value] for value in op.operands[3:]]
        while index < stop:
            values[body.arguments[0]] = index
            values.update(zip(body.arguments[1:], carried, strict=True))
            yield from self.block(body)
            if carried:
                carried = values["yield"]
            index += step
        values.update(zip(op.results, carried, strict=True))

    def branch(self, op: Op, condition: bool) -> Run:
        if not condition and len(op.regions) == 1:
            return
        yield from self.block(op.regions[0 if condition else 1])
        if op.results:
            self.values.update(zip(op.results, self.values["yield"], strict=True))

    def loop_while(self, op: Op) -> Run:
        values, (before, after) = self.values, op.regions
        carried = [values[value] for value in op.operands]
        while True:
            values.update(zip(before.arguments, carried, strict=True))
            yield from self.block(before)
            condition, *passed = values["yield"]
            if not condition:
                break
            values.update(zip(after.arguments, passed, strict=True))
            yield from self.block(after)
            carried = values["yield"]
        values.update(zip(op.results, passed, strict=True))

    # -- pipes and flags -----------------------------------------------------------------------------------------------

    def perform(self, steps: Sequence[Step], label: str) -> None:
        """The instructions of a call, for the flags and the hazard check; their effect on memory has been made."""
        hazards = self.launch.hazards
        for step in steps:
            if isinstance(step, Instruction):
                if hazards is not None:
                    hazards.access(self.lanes[step.pipe], self.lanes["S"], step, label)
            elif step.sets:
                self.set_event(step.source, step.target, step.event)
            else:
                self.wait_event(step.source, step.target, step.event)

    def token(self, pipe: str) -> Clock | None:
        hazards = self.launch.hazards
        return hazards.token(self.lanes[pipe], self.lanes["S"]) if hazards else None

    def set_event(self, source: str, target: str, event: int) -> None:
        if event == library.UNIT_FLAG:
            self.unit[source, target] = self.token(source)
            return
        tokens = self.events.setdefault((source, target, event), deque())
        if tokens and event >= 0:
            raise SimulationError(f"flag {source} -> {target}, event {event} is set again before anybody waited for it")
        tokens.append(self.token(source))

    def wait_event(self, source: str, target: str, event: int) -> None:
        hazards = self.launch.hazards
        if event == library.UNIT_FLAG:
            token = self.unit.get((source, target))
        else:
            tokens = self.events.get((source, target, event))
            if not tokens:
                raise SimulationError(f"waits for flag {source} -> {target}, event {event}, which nobody has set")
            token = tokens.popleft()
        if hazards is not None and token is not None:
            hazards.join(self.lanes[target], token)

    def barrier(self, pipe: str) -> None:
        if self.launch.hazards is not None:
            lanes = list(self.lanes.values()) if pipe == "ALL" else [self.lanes[pipe]]
            self.launch.hazards.barrier(lanes)

    def signal(self, pipe: str, flag: int) -> None:
        token = self.token(pipe)
        for peer in self.peers:
            self.flags.send(peer, self.name, flag, token)

    def receive(self, flag: int) -> bool:
        """Goes past a cross-core wait if the signals are there. The scalar pipe waits, and with it all it hands out."""
        tokens = self.flags.take(self.name, self.peers, flag)
        if tokens is None:
            return False
        if self.launch.hazards is not None:
            for token in tokens:
                assert token is not None
                self.launch.hazards.join(self.lanes["S"], token)
        return True

    def scalar_access(self, view: View, indices: Sequence[int], write: bool, label: str) -> View:
        """The element of a `memref.load` or `memref.store`."""
        if any(not 0 <= index < extent for index, extent in zip(indices, view.shape, strict=True)):
            raise SimulationError(f"index {list(indices)} is outside {view}")
        offset = view.offset + sum(index * stride for index, stride in zip(indices, view.strides, strict=True))
        element = view.part(offset, (), ())
        if self.launch.hazards is not None:
            step = Instruction("S", [], [element]) if write else Instruction("S", [element])
            self.launch.hazards.access(self.lanes["S"], self.lanes["S"], step, label)
        return element


def describe(op: Op) -> str:
    """An operation in a few words, with its source line."""
    text = op.callee or re.sub(r" : .*| ffts_base_addr.*", "", op.text)[:100]
    if op.callee:
        text += f"({', '.join(op.operands[:3])}{', ...' if len(op.operands) > 3 else ''})"
    return f"{text} [{op.location}]" if op.location else text


Action = Callable[[Core], "Callable[[], bool] | None"]
"""An operation without regions. It may return a condition to try until it holds; then other cores may take over."""


def _go_on() -> bool:
    return True


class Code:
    """A function with its operations translated to Python, once for all cores that run it."""

    def __init__(self, launch: Launch, function: Function) -> None:
        self.launch, self.function = launch, function
        self._blocks: dict[Block, list[tuple[Op, Action | None]]] = {}

    def steps(self, block: Block) -> "list[tuple[Op, Action | None]]":
        if block not in self._blocks:
            self._blocks[block] = [(op, None if op.regions else self._translated(op)) for op in block.ops]
        return self._blocks[block]

    def _translated(self, op: Op) -> Action:
        try:
            return self.translate(op)
        except SimulationError as error:
            # It is an error only where the program comes to it.
            message = str(error)

            def fail(core: Core) -> None:
                raise SimulationError(message)

            return fail

    def translate(self, op: Op) -> Action:
        handler = getattr(self, "_" + op.name.replace(".", "_"), None)
        if handler is not None:
            action: Action = handler(op)
            return action
        function = scalar.compute(op)
        if function is None:
            raise SimulationError(f"operation not understood: {op.name} in {op.text[:160]}")
        return self._store(op, function)

    @staticmethod
    def _store(op: Op, function: Callable[..., Any]) -> Action:
        names = op.operands
        (result,) = op.results
        if len(names) == 1:
            (only,) = names

            def one(core: Core) -> None:
                core.values[result] = function(core.values[only])

            return one
        if len(names) == 2:
            first, second = names

            def two(core: Core) -> None:
                core.values[result] = function(core.values[first], core.values[second])

            return two

        def many(core: Core) -> None:
            core.values[result] = function(*[core.values[name] for name in names])

        return many

    # -- control and scalars -------------------------------------------------------------------------------------------

    def _scf_yield(self, op: Op) -> Action:
        names = op.operands

        def run(core: Core) -> None:
            core.values["yield"] = [core.values[name] for name in names]

        return run

    _scf_condition = _scf_yield

    def _nothing(self, op: Op) -> Action:
        return lambda core: None

    _func_return = _return = _hivm_hir_set_ffts_base_addr = _hivm_hir_set_mask_norm = _nothing
    _annotation_mark = _nothing

    def _arith_constant(self, op: Op) -> Action:
        value = scalar.constant(op)
        return self._store(op, lambda: value)

    def _affine_apply(self, op: Op) -> Action:
        return self._store(op, self._affine(op, lambda results: results[0]))

    def _affine_min(self, op: Op) -> Action:
        return self._store(op, self._affine(op, min))

    def _affine_max(self, op: Op) -> Action:
        return self._store(op, self._affine(op, max))

    def _affine(self, op: Op, pick: Callable[[Any], int]) -> Callable[..., int]:
        name = re.search(r"#map\d*", op.text)
        if name is None or name.group() not in self.launch.maps:
            raise SimulationError(f"affine map not understood: {op.text[:160]}")
        apply = self.launch.maps[name.group()]
        return lambda *operands: pick(apply(operands))

    def _hivm_hir_get_block_idx(self, op: Op) -> Action:
        (result,) = op.results

        def run(core: Core) -> None:
            core.values[result] = core.program

        return run

    def _hivm_hir_get_sub_block_idx(self, op: Op) -> Action:
        (result,) = op.results

        def run(core: Core) -> None:
            core.values[result] = core.sub_block

        return run

    # -- views ---------------------------------------------------------------------------------------------------------

    def _hivm_hir_pointer_cast(self, op: Op) -> Action:
        kind = op.memref()
        (result,), (place, *sizes) = op.results, op.operands

        def run(core: Core) -> None:
            if kind.space not in core.memories:
                raise SimulationError(f"{core.name} has no memory {kind.space}")
            given = iter(sizes)
            shape = tuple(core.values[next(given)] if size is None else size for size in kind.shape)
            core.values[result] = View(
                core.memories[kind.space], core.values[place], 0, shape, dense(shape), kind.dtype
            )

        return run

    def _memref_view(self, op: Op) -> Action:
        kind = op.memref()
        (result,), (source, place, *sizes) = op.results, op.operands

        def run(core: Core) -> None:
            bytes_ = core.values[source]
            given = iter(sizes)
            shape = tuple(core.values[next(given)] if size is None else size for size in kind.shape)
            base = bytes_.base + bytes_.offset + core.values[place]
            core.values[result] = View(bytes_.memory, base, 0, shape, dense(shape), kind.dtype)

        return run

    def _memref_cast(self, op: Op) -> Action:
        return self._store(op, lambda view: view)

    _memref_memory_space_cast = _memref_cast

    def _memref_reinterpret_cast(self, op: Op) -> Action:
        offsets, sizes, strides = self._lists(op)
        (result,), source = op.results, op.operands[0]

        def run(core: Core) -> None:
            values = core.values
            core.values[result] = values[source].part(_of(offsets, values)[0], _of(sizes, values), _of(strides, values))

        return run

    def _memref_subview(self, op: Op) -> Action:
        offsets, sizes, strides = self._lists(op)
        kept = _kept(sizes, op.memref().shape, op)
        (result,), source = op.results, op.operands[0]

        def run(core: Core) -> None:
            view, values = core.values[source], core.values
            starts, shape, steps = _of(offsets, values), _of(sizes, values), _of(strides, values)
            for start, extent, step, whole in zip(starts, shape, steps, view.shape, strict=True):
                if (extent and not (start >= 0 and start + (extent - 1) * step < whole)) or extent < 0:
                    raise SimulationError(f"subview of size {extent} from {start} leaves {view}")
            offset = view.offset + sum(a * b for a, b in zip(starts, view.strides, strict=True))
            steps = tuple(a * b for a, b in zip(steps, view.strides, strict=True))
            values[result] = view.part(offset, tuple(shape[i] for i in kept), tuple(steps[i] for i in kept))

        return run

    @staticmethod
    def _lists(op: Op) -> list[list["int | str"]]:
        """Offsets, sizes and strides; a `%` value is its unique name."""
        head = op.text[: op.text.index(" : memref<")]
        rest = iter(op.operands[1:])
        groups = re.findall(r"\[([^\]]*)\]", head)[:3]
        return [
            [next(rest) if part.strip().startswith("%") else int(part) for part in group.split(",") if part.strip()]
            for group in groups
        ]

    def _memref_collapse_shape(self, op: Op) -> Action:
        groups = _groups(op)
        (result,), (source,) = op.results, op.operands

        def run(core: Core) -> None:
            view = core.values[source]
            shape, strides = [], []
            for members in groups:
                dims = [(view.shape[i], view.strides[i]) for i in members if view.shape[i] != 1]
                for (_, outer), (extent, inner) in pairwise(dims):
                    if outer != extent * inner and view.size:
                        raise SimulationError(f"collapse of dimensions that do not follow each other: {view}")
                shape.append(math.prod(extent for extent, _ in dims))
                strides.append(dims[-1][1] if dims else view.strides[members[-1]])
            core.values[result] = view.part(view.offset, tuple(shape), tuple(strides))

        return run

    def _memref_expand_shape(self, op: Op) -> Action:
        groups = _groups(op)
        listed = re.search(r"output_shape \[([^\]]*)\]", op.text)
        if listed is None:
            raise SimulationError(f"expansion not understood: {op.text[:160]}")
        rest = iter(op.operands[1:])
        sizes: list[int | str] = [
            next(rest) if part.strip().startswith("%") else int(part) for part in listed.group(1).split(",")
        ]
        (result,), source = op.results, op.operands[0]

        def run(core: Core) -> None:
            view, shape = core.values[source], _of(sizes, core.values)
            strides = [0] * len(shape)
            for place, members in enumerate(groups):
                step = view.strides[place]
                for i in reversed(members):
                    strides[i] = step
                    step *= shape[i]
                if math.prod(shape[i] for i in members) != view.shape[place]:
                    raise SimulationError(f"expansion of {view} to {shape}")
            core.values[result] = view.part(view.offset, shape, tuple(strides))

        return run

    def _memref_extract_strided_metadata(self, op: Op) -> Action:
        names, (source,) = op.results, op.operands

        def run(core: Core) -> None:
            view = core.values[source]
            parts = (view.part(0, (), ()), view.offset, *view.shape, *view.strides)
            core.values.update(zip(names, parts, strict=True))

        return run

    def _memref_dim(self, op: Op) -> Action:
        return self._store(op, lambda view, axis: view.shape[axis])

    def _memref_load(self, op: Op) -> Action:
        (result,), (source, *indices) = op.results, op.operands
        label = describe(op)

        def run(core: Core) -> None:
            values = core.values
            element = core.scalar_access(
                values[source], [values[index] for index in indices], False, f"{core.name} {label}"
            )
            number = element.get().item()
            core.values[result] = int(number) if isinstance(number, bool) else number

        return run

    def _memref_store(self, op: Op) -> Action:
        value, target, *indices = op.operands
        label = describe(op)

        def run(core: Core) -> None:
            values = core.values
            element = core.scalar_access(
                values[target], [values[index] for index in indices], True, f"{core.name} {label}"
            )
            element.put(library.number(values[value]))

        return run

    # -- calls and flags -----------------------------------------------------------------------------------------------

    def _func_call(self, op: Op) -> Action:
        function = library.call(op.callee)
        names, label, calls = op.operands, describe(op), self.launch.calls
        callee = op.callee

        def run(core: Core) -> Callable[[], bool]:
            values = core.values
            try:
                steps = function([values[name] for name in names])
            except (ValueError, TypeError) as error:
                raise SimulationError(f"{callee}: {error}") from error
            calls[callee] += 1
            core.perform(steps, f"{core.name} {label}")
            return _go_on

        return run

    def _hivm_hir_set_flag(self, op: Op) -> Action:
        source, target, event = self._event(op)

        def run(core: Core) -> None:
            core.set_event(source, target, event if isinstance(event, int) else core.values[event])

        return run

    def _hivm_hir_wait_flag(self, op: Op) -> Action:
        source, target, event = self._event(op)

        def run(core: Core) -> None:
            core.wait_event(source, target, event if isinstance(event, int) else core.values[event])

        return run

    @staticmethod
    def _event(op: Op) -> tuple[str, str, "int | str"]:
        match = re.search(r"_flag\[<PIPE_(\w+)>, <PIPE_(\w+)>, (?:<EVENT_ID(\d+)>|%[^\]]+)\]", op.text)
        if match is None:
            raise SimulationError(f"flag not understood: {op.text[:120]}")
        source, target, event = match.groups()
        if source not in PIPES or target not in PIPES:
            raise SimulationError(f"flag not understood: {op.text[:120]}")
        return source, target, int(event) if event is not None else op.operands[0]

    def _hivm_hir_pipe_barrier(self, op: Op) -> Action:
        match = re.search(r"\[<PIPE_(\w+)>\]", op.text)
        if match is None:
            raise SimulationError(f"barrier not understood: {op.text[:120]}")
        pipe = match.group(1)
        if pipe not in (*PIPES, "ALL"):
            raise SimulationError(f"barrier not understood: {op.text[:120]}")
        return lambda core: core.barrier(pipe)

    def _hivm_hir_sync_block_set(self, op: Op) -> Action:
        pipe, flag = self._block_event(op)

        def run(core: Core) -> Callable[[], bool]:
            core.signal(pipe, flag if isinstance(flag, int) else core.values[flag])
            return _go_on

        return run

    def _hivm_hir_sync_block_wait(self, op: Op) -> Action:
        _, flag = self._block_event(op)

        def run(core: Core) -> Callable[[], bool]:
            number = flag if isinstance(flag, int) else core.values[flag]
            return lambda: core.receive(number)

        return run

    def _block_event(self, op: Op) -> tuple[str, "int | str"]:
        match = re.search(r"\[<(CUBE|VECTOR)>, <PIPE_(\w+)>, <PIPE_S>\] flag = (\d+|%\S+)", op.text)
        if match is None:
            raise SimulationError(f"cross-core flag not understood: {op.text[:120]}")
        core, pipe, flag = match.groups()
        if (core == "CUBE") != (self.function.core == "AIC") or pipe not in PIPES:
            raise SimulationError(f"cross-core flag of another core: {op.text[:120]}")
        return pipe, int(flag) if flag.isdigit() else op.operands[0]


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a buffer without gaps."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _of(parts: Sequence["int | str"], values: Values) -> tuple[int, ...]:
    return tuple(part if isinstance(part, int) else values[part] for part in parts)


def _groups(op: Op) -> list[list[int]]:
    head = op.text[: op.text.index(" : memref<")].split("output_shape")[0]
    return [[int(i) for i in group.split(",")] for group in re.findall(r"\[(\d[\d, ]*)\]", head)]


def _kept(sizes: "Sequence[int | str]", shape: tuple[int | None, ...], op: Op) -> list[int]:
    """The dimensions that a rank-reducing subview keeps: it drops some of size 1."""
    kept: list[int] = []
    for i, size in enumerate(sizes):
        needed, left = len(shape) - len(kept), len(sizes) - i
        fits = needed and shape[len(kept)] == (size if isinstance(size, int) else None)
        if fits and not (size == 1 and left > needed):
            kept.append(i)
        elif size != 1:
            raise SimulationError(f"subview not understood: {op.text[:160]}")
    return kept
