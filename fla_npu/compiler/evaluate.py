"""Walking a program's loops for given arguments: exact totals of what one program, or a launch, moves and computes.

Only the values that decide how often something runs and how large it is are computed: loop bounds, branch conditions,
sizes of tail chunks, and whatever they are made of. A loop whose inputs were seen before is not walked again.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fla_npu.compiler.buffers import FIXED_ARGUMENTS
from fla_npu.compiler.count import Device, Key, Totals, devices
from fla_npu.compiler.hivm import Block, Module, Op
from fla_npu.compiler.integers import ORDER, SIGNED, UNSIGNED, unsigned, wrapped

Value = Any
"""An integer, or a `_Pointer` into one of the arrays given."""


class EvaluationError(ValueError):
    """A value that decides a trip count, a branch or a size is not known; the message names it."""


@dataclass(frozen=True)
class _Pointer:
    array: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Unknown:
    """Stands for a value until something depends on it."""

    why: str


@dataclass(frozen=True)
class Launch:
    """Arguments of one launch.

    Args:
        grid: programs, one number or up to three.
        scalars: kernel argument -> value.
        arrays: kernel argument -> the integers it points to, for those that the kernel reads loop bounds from.
    """

    grid: tuple[int, ...]
    scalars: Mapping[str, int] = field(default_factory=dict)
    arrays: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Program:
    """A compiled kernel that can be evaluated; `arguments` are its run-time arguments in order."""

    def __init__(self, module: Module, arguments: Iterable[str] = ()) -> None:
        self.devices = devices(module, arguments)
        for device in self.devices:
            if not device.structured:
                raise EvaluationError(
                    f"{device.function.name}: the compiler for this chip has made jumps of the loops, only A2 and A3 "
                    "programs can be evaluated"
                )
        self._plans = [_Plan(device) for device in self.devices]
        self._seen: tuple[Launch | None, _Seen] = (None, {})

    def totals(self, program: int, launch: Launch) -> Totals:
        """What one program of a launch does, cube and vector cores together.

        Raises:
            EvaluationError: a value that decides the flow or a size is not known.
        """
        if self._seen[0] is not launch:
            self._seen = (launch, {})
        total: Counter[Key] = Counter()
        for plan in self._plans:
            for sub_block in range(plan.device.copies):
                counts = plan.run(program, sub_block, launch, self._seen[1])
                # A hand-off that both vector cores signal is one hand-off.
                kept = counts if sub_block == 0 else {k: v for k, v in counts.items() if k[0] != "syncs"}
                total.update(kept)
        return Totals(total)

    def launch_totals(self, launch: Launch) -> Totals:
        """Sum over all programs of a launch."""
        total: Counter[Key] = Counter()
        count = 1
        for size in launch.grid:
            count *= size
        for program in range(count):
            total.update(self.totals(program, launch).counts)
        return Totals(total)


def evaluate(
    program: Program,
    program_id: int,
    grid: int | Sequence[int],
    scalars: Mapping[str, int] | None = None,
    arrays: Mapping[str, Sequence[int]] | None = None,
) -> Totals:
    """What program `program_id` of a launch does.

    Raises:
        EvaluationError: a value that decides the flow or a size is not known; the message names it.
    """
    return program.totals(program_id, launch(grid, scalars, arrays))


def closed_totals(device: Device) -> Totals:
    """What one run of a function does that depends on none of its arguments.

    Raises:
        EvaluationError: it depends on one.
    """
    return Totals(_Plan(device).run(0, 0, Launch((1,)), {}))


def launch(
    grid: int | Sequence[int],
    scalars: Mapping[str, int] | None = None,
    arrays: Mapping[str, Sequence[int]] | None = None,
) -> Launch:
    """The arguments of a launch in their usual forms."""
    sizes = (grid,) if isinstance(grid, int) else tuple(grid)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise ValueError(f"grid must be one to three positive numbers, got {grid!r}")
    return Launch(sizes, dict(scalars or {}), dict(arrays or {}))


class _Plan:
    """The part of one device function that decides the flow."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.buffers = device.buffers
        self.owner: dict[str, tuple[Op, int]] = {}
        """Block argument -> the loop it belongs to and its place."""
        self.live: set[int] = set()
        self.needed: set[str] = set()
        self.free: dict[int, tuple[str, ...]] = {}
        self.steps: dict[Block, list[Op]] = {}
        self.dynamic: dict[Block, tuple[str, ...]] = {}
        self.places: dict[int, frozenset[str]] = {}
        """Loop or branch -> which of the program's and vector core's number it asks for."""
        self._mark()
        self._order(device.function.body)

    # -- which operations matter ---------------------------------------------------------------------------------------

    def _mark(self) -> None:
        for op in self.device.function.body.walk():
            for region in op.regions:
                for place, value in enumerate(region.arguments):
                    self.owner[value] = (op, place)
        for block, terms in self.device.terms.items():
            names = tuple(dict.fromkeys(name for term in terms for name in term.names()))
            self.dynamic[block] = names
            for name in names:
                self._need(name)
            if terms:
                self._reach(block)

    def _reach(self, block: Block) -> None:
        """Everything that decides whether, and how often, a block runs."""
        op = block.parent
        while op is not None and id(op) not in self.live:
            self._enliven(op)
            op = op.block.parent

    def _enliven(self, op: Op) -> None:
        if id(op) in self.live:
            return
        self.live.add(id(op))
        if op.name == "scf.for":
            for value in op.operands[:3]:
                self._need(value)
        elif op.name == "scf.if":
            self._need(op.operands[0])
        elif op.name == "scf.while":
            condition = next(inner for inner in op.regions[0].ops if inner.name == "scf.condition")
            self._need(condition.operands[0])
        if op.block.parent is not None:
            self._reach(op.block)

    def _need(self, value: str) -> None:
        todo = [value]
        while todo:
            value = todo.pop()
            if value in self.needed:
                continue
            self.needed.add(value)
            if value in self.owner:
                todo += self._need_argument(*self.owner[value])
                continue
            op = self.buffers.defining(value)
            if op is None:
                continue
            self._enliven(op)
            if op.regions:
                todo += self._need_result(op, op.results.index(value))
            elif op.name not in ("func.call",):
                todo += op.operands

    def _need_argument(self, op: Op, place: int) -> list[str]:
        self._enliven(op)
        if op.name == "scf.for":
            if place == 0:
                return []
            return [op.operands[2 + place], _last(op.regions[0]).operands[place - 1]]
        if op.name == "scf.while":
            values = (
                [_last(op.regions[0]).operands[1 + place]] if place < len(_last(op.regions[0]).operands) - 1 else []
            )
            if place < len(op.operands):
                values.append(op.operands[place])
            last = _last(op.regions[1])
            return [*values, *last.operands[place : place + 1]]
        return []

    def _need_result(self, op: Op, place: int) -> list[str]:
        if op.name == "scf.for":
            return [op.operands[3 + place], _last(op.regions[0]).operands[place]]
        if op.name == "scf.if":
            return [_last(region).operands[place] for region in op.regions]
        if op.name == "scf.while":
            return [_last(op.regions[0]).operands[1 + place]]
        return []

    def _order(self, block: Block) -> set[str]:
        """Chooses the operations to run in each block, and notes which outside values each loop reads."""
        chosen, inside, used = [], set(block.arguments), set()
        for op in block.ops:
            reads: set[str] = set()
            if op.regions:
                if id(op) not in self.live:
                    continue
                for region in op.regions:
                    reads |= self._order(region)
                self.free[id(op)] = tuple(sorted(reads))
                self.places[id(op)] = frozenset(
                    inner.name for region in op.regions for inner in region.walk() if inner.name in _PLACES
                )
                reads |= {value for value in op.operands if value in self.needed}
            elif any(result in self.needed for result in op.results) or op.name in ("scf.yield", "scf.condition"):
                reads = {value for value in op.operands if value in self.needed}
            else:
                continue
            chosen.append(op)
            used |= reads - inside
            inside.update(op.results)
        self.steps[block] = chosen
        return used | (set(self.dynamic.get(block, ())) - inside)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, program: int, sub_block: int, given: Launch, seen: "_Seen") -> Counter[Key]:
        state = _Run(self, program, sub_block, given, seen)
        tally = state.block(self.device.function.body, state.arguments())
        total: Counter[Key] = Counter()
        for (block, sizes), times in tally.items():
            values = dict(zip(self.dynamic.get(block, ()), sizes, strict=True))
            for term in self.device.terms[block]:
                total[term.key] += times * term.value(values.__getitem__)
        return total


def _last(block: Block) -> Op:
    return block.ops[-1] if block.ops else Op("scf.yield", [], [], "", block)


_PLACES = ("hivm.hir.get_block_idx", "hivm.hir.get_sub_block_idx")
_Tally = Counter[tuple[Block, tuple[int, ...]]]
_Seen = dict[tuple[Any, ...], tuple[tuple[Value, ...], _Tally]]


class _Run:
    """One run of one device function. `seen` keeps what each loop did for the values it read, over all programs."""

    def __init__(self, plan: _Plan, program: int, sub_block: int, given: Launch, seen: _Seen) -> None:
        self.plan, self.program, self.sub_block, self.given, self.seen = plan, program, sub_block, given, seen
        self.yielded: tuple[Value, ...] = ()

    def arguments(self) -> dict[str, Value]:
        function, names = self.plan.device.function, self.plan.buffers.argument_of
        values: dict[str, Value] = {}
        grid = (*self.given.grid, 1, 1)[:3]
        count, entry = len(function.arguments), "hacc.entry" in function.attributes
        for position, (value, kind) in enumerate(function.arguments):
            name = names[value]
            if not entry:
                values[value] = _Unknown(f"argument {name}")
            elif position >= count - 3:
                values[value] = grid[position - count + 3]
            elif position < FIXED_ARGUMENTS:
                values[value] = _Unknown(f"argument {name}")
            elif kind.startswith("memref"):
                values[value] = (
                    _Pointer(name, 0, (1,)) if name in self.given.arrays else _Unknown(f"contents of {name}")
                )
            else:
                values[value] = self.given.scalars.get(name, _Unknown(f"argument {name}"))
        return values

    def block(self, block: Block, values: dict[str, Value]) -> _Tally:
        """Runs a block; what it yields is left in `yielded`."""
        tally: _Tally = Counter()
        for op in self.plan.steps[block]:
            if op.name in ("scf.yield", "scf.condition"):
                self.yielded = tuple(values.get(value, _Unknown(value)) for value in op.operands)
            elif op.regions:
                tally.update(self.region(op, values))
            else:
                values.update(zip(op.results, self.compute(op, values), strict=False))
        if self.plan.device.terms.get(block):
            sizes = tuple(self.integer(values, name, "a size") for name in self.plan.dynamic[block])
            tally[block, sizes] += 1
        return tally

    def region(self, op: Op, values: dict[str, Value]) -> _Tally:
        inputs = [values.get(value, _Unknown(value)) for value in op.operands]
        places = self.plan.places[id(op)]
        place = (self.program if _PLACES[0] in places else None, self.sub_block if _PLACES[1] in places else None)
        key = (id(op), *place, *inputs, *(values.get(value) for value in self.plan.free[id(op)]))
        if key not in self.seen:
            run = {"scf.for": self.loop, "scf.if": self.branch, "scf.while": self.loop_while}.get(op.name)
            if run is None:
                raise EvaluationError(f"{op.results or op.name}: operation {op.name} is not understood")
            outer, self.yielded = self.yielded, ()
            self.seen[key] = run(op, values)
            self.yielded = outer
        results, tally = self.seen[key]
        values.update(zip(op.results, results, strict=False))
        return tally

    def loop(self, op: Op, values: dict[str, Value]) -> tuple[tuple[Value, ...], _Tally]:
        start, stop, step = (self.integer(values, value, "a loop's bound") for value in op.operands[:3])
        if step <= 0:
            raise EvaluationError(f"{op.operands[2]}: a loop's step must be positive, got {step}")
        carried = tuple(values.get(value, _Unknown(value)) for value in op.operands[3:])
        body = op.regions[0]
        tally: _Tally = Counter()
        for index in range(start, stop, step):
            inner = dict(values)
            inner.update(zip(body.arguments, (index, *carried), strict=True))
            tally.update(self.block(body, inner))
            carried = self.yielded
        return carried, tally

    def branch(self, op: Op, values: dict[str, Value]) -> tuple[tuple[Value, ...], _Tally]:
        taken = self.integer(values, op.operands[0], "a branch's condition")
        number = 0 if taken else 1
        if number >= len(op.regions):
            return (), Counter()
        tally = self.block(op.regions[number], dict(values))
        return self.yielded, tally

    def loop_while(self, op: Op, values: dict[str, Value]) -> tuple[tuple[Value, ...], _Tally]:
        before, after = op.regions
        carried = tuple(values.get(value, _Unknown(value)) for value in op.operands)
        condition = _last(before).operands[0]
        tally: _Tally = Counter()
        while True:
            inner = dict(values)
            inner.update(zip(before.arguments, carried, strict=True))
            tally.update(self.block(before, inner))
            held, passed = self.yielded[0], self.yielded[1:]
            if isinstance(held, _Unknown):
                raise EvaluationError(f"{condition}: a loop's condition depends on {held.why}, which is not known")
            if not held:
                return passed, tally
            inner = dict(values)
            inner.update(zip(after.arguments, passed, strict=True))
            tally.update(self.block(after, inner))
            carried = self.yielded

    def integer(self, values: Mapping[str, Value], name: str, what: str) -> int:
        value = values.get(name)
        if isinstance(value, int):
            return value
        why = value.why if isinstance(value, _Unknown) else "a value that is not computed"
        place = self.plan.device.function.name
        raise EvaluationError(f"{name} in {place} is {what} and depends on {why}, which is not known")

    def compute(self, op: Op, values: Mapping[str, Value]) -> tuple[Value, ...]:
        inputs = [values.get(value, _Unknown(value)) for value in op.operands]
        if op.name == "memref.extract_strided_metadata":
            source = inputs[0]
            if not isinstance(source, _Pointer):
                return (source,) * len(op.results)
            sizes = [_Unknown(value) for value in op.results[2 : 2 + len(source.strides)]]
            return (_Pointer(source.array, 0, ()), source.offset, *sizes, *source.strides)
        return (self.value(op, inputs),)

    def value(self, op: Op, inputs: Sequence[Value]) -> Value:
        if op.name == "hivm.hir.get_block_idx":
            return self.program
        if op.name == "hivm.hir.get_sub_block_idx":
            return self.sub_block
        if op.name == "hivm.hir.get_sub_block_num":
            return self.plan.device.copies
        if op.name == "arith.constant":
            number = self.plan.buffers.constants.get(op.results[0])
            return number if isinstance(number, int) else _Unknown(f"constant {op.results[0]}")
        if op.name == "arith.select":
            return self.select(inputs)
        if op.name == "memref.load":
            return self.load(op, inputs)
        if op.name in ("memref.reinterpret_cast", "memref.subview", "memref.cast", "memref.memory_space_cast"):
            return self.view(op, inputs)
        unknown = next((value for value in inputs if isinstance(value, _Unknown)), None)
        if unknown is not None:
            return unknown
        if op.name.startswith("affine."):
            name = re.search(r"#map\d*", op.text)
            if name is not None:
                found = self.plan.device.module.maps[name.group()](inputs)
                return {"affine.min": min, "affine.max": max, "affine.apply": min}[op.name](found)
        if op.name.startswith("arith.") and all(isinstance(value, int) for value in inputs):
            return self.arithmetic(op, inputs)
        return _Unknown(f"{op.results[0]} = {op.name}")

    @staticmethod
    def arithmetic(op: Op, inputs: Sequence[int]) -> Value:
        name = op.name.removeprefix("arith.")
        kinds = re.findall(r"\b(i1|i8|i16|i32|i64|index)\b", op.text.rpartition(" : ")[2])
        if not kinds:
            return _Unknown(f"{op.results[0]} = {op.name}")
        first, last = kinds[0], kinds[-1]
        if name in SIGNED:
            if inputs[1] == 0 and ("div" in name or "rem" in name):
                raise EvaluationError(f"{op.results[0]} = {op.name} divides by zero")
            return wrapped(SIGNED[name](inputs[0], inputs[1]), last)
        if name in UNSIGNED:
            if inputs[1] == 0 and ("div" in name or "rem" in name):
                raise EvaluationError(f"{op.results[0]} = {op.name} divides by zero")
            return wrapped(UNSIGNED[name](unsigned(inputs[0], last), unsigned(inputs[1], last)), last)
        if name == "cmpi":
            kind = re.search(r"cmpi ([us]?)(eq|ne|lt|le|gt|ge),", op.text)
            if kind is None:
                return _Unknown(f"{op.results[0]} = {op.text}")
            a, b = (unsigned(value, last) for value in inputs) if kind.group(1) == "u" else inputs
            return int(ORDER[kind.group(2)](a, b))
        if name in ("index_cast", "extsi", "trunci"):
            # One bit reads as 0 or 1 everywhere but where its sign is extended.
            source = -inputs[0] if first == "i1" and name != "trunci" else inputs[0]
            return wrapped(source, last)
        if name in ("extui", "index_castui"):
            return wrapped(unsigned(inputs[0], first), last)
        return _Unknown(f"{op.results[0]} = {op.name}")

    @staticmethod
    def select(inputs: Sequence[Value]) -> Value:
        condition, first, second = inputs
        if isinstance(condition, _Unknown):
            return first if first == second else condition
        return first if condition else second

    def view(self, op: Op, inputs: Sequence[Value]) -> Value:
        source = inputs[0]
        if not isinstance(source, _Pointer) or op.name in ("memref.cast", "memref.memory_space_cast"):
            return source
        groups = re.findall(r"\[([^\]]*)\]", op.text[: op.text.index(" : memref<")])
        rest = iter(inputs[1:])
        numbers: list[list[Value]] = []
        for group in groups[:3]:
            parts = [part.strip() for part in group.split(",") if part.strip()]
            numbers.append([next(rest) if part.startswith("%") else int(part) for part in parts])
        offsets, _, strides = numbers
        unknown = next((value for value in (*offsets, *strides) if not isinstance(value, int)), None)
        if unknown is not None:
            return unknown
        if op.name == "memref.reinterpret_cast":
            return _Pointer(source.array, offsets[0], tuple(strides))
        if len(offsets) != len(source.strides) or len(op.memref().shape) != len(offsets):
            return _Unknown(f"{op.results[0]}, a view of {source.array}")
        start = source.offset + sum(a * b for a, b in zip(offsets, source.strides, strict=True))
        return _Pointer(source.array, start, tuple(a * b for a, b in zip(strides, source.strides, strict=True)))

    def load(self, op: Op, inputs: Sequence[Value]) -> Value:
        pointer, indices = inputs[0], inputs[1:]
        if isinstance(pointer, _Unknown):
            return pointer
        if not isinstance(pointer, _Pointer):
            return _Unknown(f"{op.results[0]}, loaded from on-core memory")
        unknown = next((value for value in indices if not isinstance(value, int)), None)
        if unknown is not None:
            return unknown
        if len(indices) != len(pointer.strides):
            return _Unknown(f"{op.results[0]}, loaded from {pointer.array}")
        place = pointer.offset + sum(a * b for a, b in zip(indices, pointer.strides, strict=True))
        array = self.given.arrays[pointer.array]
        if not 0 <= place < len(array):
            raise EvaluationError(f"{op.results[0]} reads {pointer.array}[{place}], which has {len(array)} elements")
        return int(array[place])
