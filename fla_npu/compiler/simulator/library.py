"""What each call into the vendor's library does to memory, and the pipe it runs on.

Operand order and layouts are those of section 6 of the project's notes on the compiler. A call that is not described
here is an error. Everything a call may leave undefined is poisoned: scratch operands, padding up to 32 bytes of a
load, and the columns of an accumulator that a matrix product does not reach.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fla_npu.compiler.simulator.memory import Array, SimulationError, View

Operand = Any
"""A `View`, or a number."""

BLOCK = 32
"""Bytes of the smallest piece that the DMA engines and the vector unit move."""


@dataclass
class Instruction:
    """One instruction of a call, for the hazard check: its pipe and what it accesses."""

    pipe: str
    reads: list[View] = field(default_factory=list)
    writes: list[View] = field(default_factory=list)
    scratch: list[View] = field(default_factory=list)
    """Written too; between instructions of one pipe the library orders it."""
    same: bool = False
    """It writes what was there: two such writes need no order. Both vector cores hand over scalars in this way."""


@dataclass
class Wait:
    """A flag that a call waits for, or sets where `sets` is true, between its instructions."""

    source: str
    target: str
    event: int
    sets: bool


UNIT_FLAG = -1
"""The event of the cube's own flag between an accumulator's last product and fixpipe."""

_STAGED = -2
"""The event between the library's loads to L0 and its product."""

Step = Instruction | Wait
Call = Callable[[Sequence[Operand]], Sequence[Step]]

_TYPES = r"(?:float|half|bfloat16_t|int8_t|int16_t|int32_t|int64_t|uint8_t|uint16_t|uint32_t|uint64_t|bool)"


def call(name: str) -> Call:
    """The meaning of a library function.

    Raises:
        SimulationError: it is not known.
    """
    for pattern, make in _CALLS:
        match = re.fullmatch(pattern, name)
        if match is not None:
            found: Call = make(**match.groupdict())
            return found
    raise SimulationError(f"library call not understood: {name}")


# -- data movement -----------------------------------------------------------------------------------------------------


def _nd2nz() -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        gm, l1 = operands[0], operands[1]
        _expect(gm, "gm", 2)
        _expect(l1, "cbuf", 4)
        rows, columns = gm.shape
        tiles, _, _, width = l1.shape
        if -(-columns // width) > tiles or rows > l1.shape[1] * l1.shape[2]:
            raise SimulationError(f"nd2nz of {gm} does not fit {l1}")
        row = l1.strides[2]
        if l1.shape[1] > 1 and l1.strides[1] != 16 * row:
            raise SimulationError(f"nd2nz to rows that do not follow each other: strides {l1.strides}")
        # The engine fills the last block of a row with zeros.
        whole = np.zeros((rows, -(-columns // width) * width), gm.raw().dtype)
        whole[:, :columns] = gm.raw()
        target = l1.part(l1.offset, (whole.shape[1] // width, rows, width), (l1.strides[0], row, l1.strides[3]))
        target.raw()[...] = whole.reshape(rows, -1, width).transpose(1, 0, 2)
        return [Instruction("MTE2", [gm], [target])]

    return run


def _set_l1() -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        value, l1 = operands[0], operands[1]
        _expect(l1, "cbuf", 1)
        l1.put(np.full(l1.shape, value, np.float32))
        return [Instruction("MTE2", [], [l1])]

    return run


def _fixpipe(a: str, b: str, form: str) -> Call:
    quantized = {("float", "float"): 0, ("float", "half"): 1, ("float", "bfloat16_t"): 16, ("int32_t", "int32_t"): 0}

    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        l0c, gm, quant, relu, split, unit = operands[:6]
        if l0c.space != "cc":
            raise SimulationError(
                f"fixpipe reads {l0c} in {l0c.space}: it can only read L0C, the compiler has lost the dot that was here"
            )
        _expect(l0c, "cc", 4)
        _expect(gm, "gm", 2)
        if form != "nz2nd_4d_to_2d" or relu or split or quantized.get((a, b)) != quant:
            raise SimulationError(
                f"fixpipe form not understood: {form} {a} to {b}, quant {quant}, relu {relu}, {split}"
            )
        rows, columns = gm.shape
        whole = _matrix(l0c.get())
        if rows > whole.shape[0] or columns > whole.shape[1]:
            raise SimulationError(f"fixpipe of {l0c} to the larger {gm}")
        gm.put(whole[:rows, :columns])
        read = l0c.part(l0c.offset, (-(-columns // 16), -(-rows // 16), 16, 16), l0c.strides)
        steps: list[Step] = [Instruction("FIX", [read], [gm])]
        if unit:
            steps = [Wait("M", "FIX", UNIT_FLAG, False), *steps, Wait("FIX", "M", UNIT_FLAG, True)]
        return steps

    return run


def _load() -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        gm, ub, mode, value, left = operands[:5]
        if gm.space != "gm" or ub.space != "ub" or gm.shape != ub.shape:
            raise SimulationError(f"load of {gm} to {ub}")
        if gm.dtype != ub.dtype or mode not in (0, 2):
            raise SimulationError(f"load with pad mode {mode} not understood, {gm} to {ub}")
        if 0 in ub.shape:
            return [Instruction("MTE2")]
        ub.raw()[...] = gm.raw()
        written = [ub]
        for edge in _padding(ub, int(left)):
            if mode == 2:
                edge.put(np.full(edge.shape, value, np.float64))
            else:
                edge.poison()
            written.append(edge)
        return [Instruction("MTE2", [gm], written)]

    return run


def _padding(ub: View, left: int) -> list[View]:
    """What a load writes besides its data: each row becomes whole blocks of 32 bytes."""
    if ub.dtype == "i1" or ub.strides[-1] != 1:
        return []
    per_block = BLOCK * 8 // ub.item_bits
    edges = []
    outer, steps = ub.shape[:-1], ub.strides[:-1]
    if left:
        edges.append(ub.part(ub.offset - left, (*outer, left), (*steps, 1)))
    right = -(left + ub.shape[-1]) % per_block
    # Rows closer to each other than a block are one piece.
    if outer and any(extent > 1 and stride < ub.shape[-1] + right for extent, stride in zip(outer, steps, strict=True)):
        right = 0
    if right:
        edges.append(ub.part(ub.offset + ub.shape[-1], (*outer, right), (*steps, 1)))
    return edges


def _store() -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        ub, gm, atomic = operands[:3]
        if gm.space != "gm" or ub.space != "ub" or gm.shape != ub.shape or gm.dtype != ub.dtype:
            raise SimulationError(f"store of {ub} to {gm}")
        if atomic not in (0, 1, 2, 3):
            raise SimulationError(f"store with atomic kind {atomic} not understood")
        if 0 in gm.shape:
            return [Instruction("MTE3")]
        if atomic:
            gm.put(_ATOMICS[atomic](gm.get(), ub.get()))
            return [Instruction("MTE3", [ub], [gm])]
        source, target = ub.raw(), gm.raw()
        same = source.tobytes() == target.tobytes()
        target[...] = source
        return [Instruction("MTE3", [ub], [gm], same=same)]

    return run


_ATOMICS: dict[int, Any] = {1: np.add, 2: np.maximum, 3: np.minimum}


def _copy() -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        source, target = operands[0], operands[1]
        if source.space != "ub" or target.space != "ub" or source.dtype != target.dtype:
            raise SimulationError(f"copy of {source} to {target}")
        if operands[2:] and operands[2] != 0:
            raise SimulationError(f"copy with pad mode {operands[2]} not understood, {source} to {target}")
        target.put(source.get())
        return [Instruction("V", [source], [target])]

    return run


# -- cube --------------------------------------------------------------------------------------------------------------


def _matrix(tiles: Array) -> Array:
    """`[N1, M1, 16, N0]` as `[M1 * 16, N1 * N0]`."""
    return tiles.transpose(1, 2, 0, 3).reshape(tiles.shape[1] * tiles.shape[2], -1)


def _mma(a: str, b: str, turned: str) -> Call:
    flip_a, flip_b = "_ta" in turned, "_tb" in turned
    if (a, b) not in (("float", "float"), ("half", "float"), ("bfloat16_t", "float")):
        raise SimulationError(f"matrix product not understood: {a} to {b}")

    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        left, right, init, _, depth, width, target = operands[:7]
        wait_a, wait_b, set_a, set_b, parity, back0, back1 = (int(value) for value in operands[7:14])
        unit = operands[14]
        _expect(left, "cbuf", 4)
        _expect(right, "cbuf", 4)
        _expect(target, "cc", 4)
        if depth <= 0:
            raise SimulationError("matrix product over an empty axis: what its target then holds is not defined")
        first, second = _matrix(left.get()), _matrix(right.get())
        first = first.T if flip_a else first
        second = second.T if flip_b else second
        # The unit works on all rows of the target and on whole 16 wide tile columns; the other columns keep what they
        # have.
        rows, columns = target.shape[1] * 16, -(-width // 16) * 16
        if first.shape[0] < rows or min(first.shape[1], second.shape[0]) < depth or second.shape[1] < width:
            raise SimulationError(
                f"matrix product of {first.shape} and {second.shape} over {depth} to {rows}x{columns}"
            )
        with np.errstate(invalid="ignore", over="ignore"):
            product = np.matmul(
                np.ascontiguousarray(first[:rows, :depth], np.float32),
                np.ascontiguousarray(second[:depth, :columns], np.float32),
            )
            if product.shape[1] < columns:
                edge = np.full((rows, columns - product.shape[1]), np.nan, np.float32)
                product = np.concatenate([product, edge], axis=1)
            part = target.part(target.offset, (columns // 16, *target.shape[1:]), target.strides)
            if not init:
                product = _matrix(part.get()) + product
        part.put(product.reshape(target.shape[1], 16, columns // 16, 16).transpose(2, 0, 1, 3))
        return _mma_steps(
            (left, right, part, bool(init)), (wait_a, wait_b, set_a, set_b), _banks(left, right, flip_a, flip_b, depth,
            parity), (back0, back1), int(unit)
        )  # fmt: skip

    return run


def _banks(left: View, right: View, flip_a: bool, flip_b: bool, depth: int, parity: int) -> tuple[int, ...]:
    """Which halves of L0A and L0B the library takes, one after the other: it cuts the depth to fit."""
    rows = left.shape[0] * left.shape[3] if flip_a else left.shape[1] * left.shape[2]
    columns = right.shape[1] * right.shape[2] if flip_b else right.shape[0] * right.shape[3]
    unit = 16
    longest = -(-max(rows, columns) // unit) * unit
    bank = 64 * 1024 // 2 // (left.item_bits // 8)
    piece = bank // longest // unit * unit
    if not piece:
        piece, pieces = bank * 2 // longest // unit * unit, 0
        pieces = -(-depth // max(piece, 1))
        return (0,) * pieces
    pieces = -(-depth // piece)
    return tuple(((parity * pieces if parity != -1 else 0) + number) % 2 for number in range(pieces))


def _mma_steps(
    views: tuple[View, View, View, bool],
    flags: tuple[int, int, int, int],
    banks: tuple[int, ...],
    back: tuple[int, int],
    unit: int,
) -> Sequence[Step]:
    left, right, target, init = views
    wait_a, wait_b, set_a, set_b = flags
    steps: list[Step] = []
    for number, bank in enumerate(banks):
        start, end = number == 0, number + 1 == len(banks)
        if back[bank] != -1:
            steps.append(Wait("M", "MTE1", back[bank], False))
        if start and wait_a != -1:
            steps.append(Wait("MTE2", "MTE1", wait_a, False))
        steps.append(Instruction("MTE1", [left]))
        if end and set_a != -1:
            steps.append(Wait("MTE1", "MTE2", set_a, True))
        if start and wait_b != -1:
            steps.append(Wait("MTE2", "MTE1", wait_b, False))
        steps.append(Instruction("MTE1", [right]))
        if end and set_b != -1:
            steps.append(Wait("MTE1", "MTE2", set_b, True))
        steps += [Wait("MTE1", "M", _STAGED, True), Wait("MTE1", "M", _STAGED, False)]
        if unit and start:
            steps.append(Wait("FIX", "M", UNIT_FLAG, False))
        steps.append(Instruction("M", [] if init and start else [target], [target]))
        if unit and end:
            steps.append(Wait("M", "FIX", UNIT_FLAG, True))
        if back[bank] != -1:
            steps.append(Wait("M", "MTE1", back[bank], True))
    return steps


# -- vector ------------------------------------------------------------------------------------------------------------


def _vector(reads: Sequence[Operand], target: View, scratch: Sequence[Operand], values: Array) -> Sequence[Step]:
    """Writes a vector result; scratch operands hold nothing useful afterwards."""
    sources = [view for view in reads if isinstance(view, View)]
    temps = [view for view in scratch if isinstance(view, View) and view.size]
    for view in (*sources, target, *temps):
        if view.space != "ub":
            raise SimulationError(f"vector code works on UB, got {view} in {view.space}")
    for view in temps:
        view.poison()
    target.put(values)
    return [Instruction("V", sources, [target], temps)]


def number(value: float) -> Array:
    """A scalar as the array that a view of one element takes."""
    return np.asarray(value)


def _value(operand: Operand, like: View | None = None) -> Any:
    if isinstance(operand, View):
        return operand.get()
    if like is None:
        return operand
    kind = np.float32 if like.dtype == "bf16" else bool if like.dtype == "i1" else like.raw().dtype
    return np.asarray(operand).astype(kind)


def _shifted(numbers: Array, by: Array, right: bool) -> Array:
    return np.right_shift(numbers, by) if right else np.left_shift(numbers, by)


def _divide(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.integer):
        raise SimulationError("integer division by vector code is not understood")
    quotient: Array = a / b
    return quotient


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "max": np.maximum,
    "min": np.minimum,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: _shifted(a, b, False),
    "shr": lambda a, b: _shifted(a, b, True),
}


def _binary(op: str) -> Call:
    apply = _BINARY[op]

    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        a, b, target = operands[:3]
        like = a if isinstance(a, View) else b
        with np.errstate(all="ignore"):
            values = apply(_value(a, like), _value(b, like))
        return _vector([a, b], target, operands[3:], values)

    return run


_UNARY: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "ln": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "rec": lambda a: 1 / a,
    "abs": np.abs,
    "relu": lambda a: np.maximum(a, 0),
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


def _unary(op: str) -> Call:
    apply = _UNARY[op]

    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        a, target = operands[:2]
        with np.errstate(all="ignore"):
            values = apply(a.get())
        return _vector([a], target, operands[2:], values)

    return run


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _compare(op: str) -> Call:
    apply = _COMPARE[op]

    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        a, b, target = operands[:3]
        like = a if isinstance(a, View) else b
        return _vector([a, b], target, operands[3:], apply(_value(a, like), _value(b, like)))

    return run


def _select() -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        mask, a, b, target = operands[:4]
        values = np.where(mask.get(), _value(a, target), _value(b, target))
        return _vector([mask, a, b], target, operands[4:], np.broadcast_to(values, target.shape))

    return run


def _half_away(values: Array) -> Array:
    return np.copysign(np.floor(np.abs(values) + 0.5), values)


_ROUND: dict[int, Callable[[Any], Any]] = {0: np.rint, 1: _half_away, 2: np.floor, 3: np.ceil, 4: np.trunc}
_FLOATS = ("float", "half", "bfloat16_t")


def _cast(a: str, b: str, form: str) -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        source, target = operands[:2]
        scratch, mode = (operands[2:-1], int(operands[-1]))
        if mode not in _ROUND:
            raise SimulationError(f"rounding mode {mode} of a cast from {a} to {b} is not understood")
        values = source.get()
        if a in _FLOATS and b in _FLOATS:
            if a == b:
                values = _ROUND[mode](values)
            elif target.item_bits < source.item_bits and mode != 0:
                raise SimulationError(f"rounding mode {mode} of a cast from {a} to {b} is not understood")
        elif a in _FLOATS and b != "bool":
            limits = np.iinfo(target.raw().dtype)
            # The unit saturates, and turns NaN into zero.
            with np.errstate(invalid="ignore"):
                rounded = _ROUND[mode](values.astype(np.float64))
            values = np.where(np.isnan(rounded), 0, np.clip(rounded, limits.min, limits.max))
        elif b == "bool":
            values = values != 0
        elif target.item_bits < source.item_bits and b not in _FLOATS:
            # Integers are cut off, with or without the overflow form, which only differ in how they get there.
            values = values.astype(target.raw().dtype)
        return _vector([source], target, scratch, values)

    return run


def _reduce(op: str, axes: str) -> Call:
    apply = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]

    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        a, target = operands[:2]
        if len(axes) != len(a.shape):
            raise SimulationError(f"reduction of axes {axes} of {a}")
        over = tuple(number for number, letter in enumerate(axes) if letter == "r")
        values = apply.reduce(a.get(), axis=over, keepdims=True)
        scratch = [operand for operand in operands[2:] if isinstance(operand, View)]
        return _vector([a], target, scratch, values.reshape(target.shape))

    return run


def _fill() -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        value, target = operands[0], operands[1]
        return _vector(
            [], target, operands[2:], np.full(target.shape, value, np.float64 if isinstance(value, float) else None)
        )

    return run


def _broadcast() -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        a, target = operands[:2]
        return _vector([a], target, operands[2:], np.broadcast_to(a.get(), target.shape))

    return run


def _cumulate(op: str, axes: str) -> Call:
    apply = {"sum": np.add, "prod": np.multiply}[op]

    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        a, target = operands[:2]
        if len(axes) != len(a.shape) or axes.count("r") != 1:
            raise SimulationError(f"cumulation over axes {axes} of {a}")
        values = a.get()
        return _vector([a], target, operands[2:], apply.accumulate(values, axis=axes.index("r"), dtype=values.dtype))

    return run


def _arange() -> Call:
    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        target, start, strides = operands[0], operands[1], operands[2:]
        if len(strides) != len(target.shape):
            raise SimulationError(f"arange with {len(strides)} strides to {target}")
        values = np.full((), start, np.int64)
        for extent, stride in zip(target.shape, strides, strict=True):
            values = values[..., None] + np.arange(extent) * stride
        return _vector([], target, [], values.reshape(target.shape))

    return run


def _transpose(rank: str, last: str) -> Call:
    order = (1, 0) if rank == "2" else (2, 1, 0) if last == "with" else (1, 0, 2)

    def run(operands: Sequence[Operand]) -> Sequence[Step]:
        a, target = operands[:2]
        return _vector([a], target, operands[2:], a.get().transpose(order))

    return run


def _expect(view: View, space: str, rank: int) -> None:
    if not isinstance(view, View) or view.space != space or len(view.shape) != rank:
        raise SimulationError(f"operand must be of rank {rank} in {space}, got {view}")


_CALLS: list[tuple[str, Callable[..., Call]]] = [
    (rf"nd2nz_{_TYPES}", _nd2nz),
    (rf"set_l1_2d_{_TYPES}", _set_l1),
    (rf"fixpipe_nz2nd_(?P<a>{_TYPES})_to_(?P<b>{_TYPES})_(?P<form>\d+d_to_\d+d)",
     lambda a, b, form: _fixpipe(a, b, "nz2nd_" + form)),
    (rf"fixpipe_normal_(?P<a>{_TYPES})_to_(?P<b>{_TYPES})_(?P<form>\d+d_to_\d+d)",
     lambda a, b, form: _fixpipe(a, b, "normal_" + form)),
    (rf"load_gm_to_ubuf_\dd_{_TYPES}", _load),
    (rf"store_ubuf_to_gm_\dd_{_TYPES}", _store),
    (rf"copy_ubuf_to_ubuf_\dd_{_TYPES}", _copy),
    (rf"mma_tile_(?P<a>{_TYPES})_to_(?P<b>{_TYPES})(?P<turned>(?:_t[ab])*)", _mma),
    (rf"v(?P<op>{'|'.join(_BINARY)})(?:s?_[sv]{{2}})?_\dd_{_TYPES}", _binary),
    (rf"v(?P<op>{'|'.join(_UNARY)})_\dd_{_TYPES}", _unary),
    (rf"vcmps?_(?P<op>{'|'.join(_COMPARE)})(?:_[sv]{{2}})?_\dd_{_TYPES}", _compare),
    (rf"vsel_[sv]{{2}}_\dd_(?:bool_)?{_TYPES}", _select),
    (rf"vcast_(?P<a>{_TYPES})_to_(?P<b>{_TYPES})_\dd_with_(?P<form>mode|overflow|temp)", _cast),
    (rf"(?:enablevcg?_)?reduce_(?P<op>sum|max|min|prod)_(?P<axes>[ar]+)_{_TYPES}", _reduce),
    (rf"broadcast_scalar_{_TYPES}_to_\dd", _fill),
    (rf"broadcast_(?:first|middle|last)_axis_(?:un)?align_\dd_{_TYPES}", _broadcast),
    (rf"cum(?P<op>sum|prod)_(?P<axes>[ar]+)_{_TYPES}", _cumulate),
    (rf"arange_\dd_{_TYPES}", _arange),
    (rf"transpose_(?P<rank>[23])d_(?P<last>with|without)_last_axis_{_TYPES}", _transpose),
]  # fmt: skip
