"""What each buffer value of a function is: its sizes, where it lives and what it is a part of."""

import math
import re
from dataclasses import dataclass, replace

from fla_npu.compiler.hivm import ITEM_BITS, Dims, Function, MemRef, Module, Op, ParseError, constant

FIXED_ARGUMENTS = 3
"""FFTS base address, sync lock and workspace come before a kernel's own arguments; the three grid sizes come after."""


_VIEWS = {
    "memref.cast",
    "memref.memory_space_cast",
    "memref.view",
    "memref.subview",
    "memref.reinterpret_cast",
    "memref.collapse_shape",
    "memref.expand_shape",
    "memref.extract_strided_metadata",
}


@dataclass(frozen=True)
class Buffer:
    """A view of memory.

    `dims` are exact, with the names of values that hold sizes known only at run time; `bound` are the sizes of a full
    tile, None where nothing says.
    """

    dims: Dims
    bound: tuple[int | None, ...]
    dtype: str
    space: str
    root: str
    """Kernel argument, `workspace`, or the value of the `pointer_cast` that placed an on-core buffer."""
    offset: int | None = None
    """Bytes from the start of a workspace (the part all programs share left out) or of an on-core memory."""

    @property
    def item_bits(self) -> int:
        return ITEM_BITS[self.dtype]

    def full_bytes(self) -> int | None:
        """Bytes of a full tile."""
        if any(size is None for size in self.bound):
            return None
        return -(-math.prod(size or 0 for size in self.bound) * self.item_bits // 8)

    def __str__(self) -> str:
        return "x".join([*("?" if size is None else str(size) for size in self.bound), self.dtype])


class Buffers:
    """The buffers of one function, by value."""

    def __init__(self, module: Module, function: Function, arguments: list[str] | tuple[str, ...] = ()) -> None:
        self.module = module
        self.function = function
        self.of: dict[str, Buffer] = {}
        self.constants: dict[str, int | float] = {}
        self.argument_of = argument_names(function, arguments)
        self._kinds: dict[str, int] = {}
        for value, kind in function.arguments:
            if kind.startswith("memref"):
                self.of[value] = self._typed(Op("", [], [], kind, function.body).memref(0), self.argument_of[value])
            tensor_kind = re.search(r"tensor_kind = (\d+)", kind)
            if tensor_kind:
                self._kinds[self.argument_of[value]] = int(tensor_kind.group(1))
        self._defined: dict[str, Op] = {}
        for op in function.body.walk():
            self._note(op)

    def __getitem__(self, value: str) -> Buffer:
        if value not in self.of:
            raise ParseError(f"{self.function.name}: not a buffer: {value}")
        return self.of[value]

    def defining(self, value: str) -> Op | None:
        """The operation that makes a value, None for an argument."""
        return self._defined.get(value)

    def size(self, value: str) -> "int | str":
        """A size as an integer where it is constant."""
        number = self.constants.get(value)
        return int(number) if number is not None else value

    def _typed(self, kind: MemRef, root: str, offset: int | None = None) -> Buffer:
        dims = tuple("?" if size is None else size for size in kind.shape)
        return Buffer(dims, kind.shape, kind.dtype, kind.space, root, offset)

    def _note(self, op: Op) -> None:
        for result in op.results:
            self._defined[result] = op
        handler = getattr(self, "_" + op.name.replace(".", "_"), None)
        if handler is not None and all(value in self.of for value in self._sources(op)):
            handler(op)
        for region in op.regions:
            self._carry(op, region.arguments)

    @staticmethod
    def _sources(op: Op) -> list[str]:
        """The buffer that an operation makes a view of. After A5's lowering some come from where nothing is known."""
        return op.operands[:1] if op.name in _VIEWS else []

    def _carry(self, op: Op, arguments: list[str]) -> None:
        """A loop's carried buffers are those that it starts with."""
        if op.name == "scf.for":
            initial = op.operands[3:]
            for value, start in zip(arguments[1:], initial, strict=False):
                if start in self.of:
                    self.of[value] = self.of[start]
            for value, start in zip(op.results, initial, strict=False):
                if start in self.of:
                    self.of[value] = self.of[start]
        elif op.name == "scf.while":
            for value, start in zip(arguments, op.operands, strict=False):
                if start in self.of:
                    self.of[value] = self.of[start]

    def _scf_yield(self, op: Op) -> None:
        """A branch's buffers are those of its first arm: both arms yield tiles of one type and place."""
        branch = op.block.parent
        if branch is not None and branch.name == "scf.if":
            for value, source in zip(branch.results, op.operands, strict=False):
                if source in self.of:
                    self.of.setdefault(value, self.of[source])

    def _arith_constant(self, op: Op) -> None:
        if "dense<" not in op.text:
            self.constants[op.results[0]] = constant(op)

    def _hivm_hir_pointer_cast(self, op: Op) -> None:
        offset = self.constants.get(op.operands[0])
        buffer = self._typed(op.memref(), op.results[0], None if offset is None else int(offset))
        self.of[op.results[0]] = _with_sizes(buffer, [self.size(value) for value in op.operands[1:]])

    def _memref_view(self, op: Op) -> None:
        source = self[op.operands[0]]
        buffer = self._typed(op.memref(), source.root, self._view_offset(op.operands[1]))
        self.of[op.results[0]] = _with_sizes(buffer, [self.size(value) for value in op.operands[2:]])

    def _view_offset(self, value: str) -> int | None:
        """The constant part of `block * size + constant`."""
        if value in self.constants:
            return int(self.constants[value])
        op = self.defining(value)
        if op is None or op.name != "affine.apply":
            return None
        name = re.search(r"#map\d*", op.text)
        return self.module.maps[name.group()]([0] * len(op.operands))[0] if name else None

    def _memref_alloc(self, op: Op) -> None:
        self.of[op.results[0]] = self._typed(op.memref(), op.results[0])

    _memref_alloca = _memref_alloc

    def _memref_cast(self, op: Op) -> None:
        self.of[op.results[0]] = self[op.operands[0]]

    _memref_memory_space_cast = _memref_cast

    def _memref_extract_strided_metadata(self, op: Op) -> None:
        source = self[op.operands[0]]
        self.of[op.results[0]] = replace(source, dims=(), bound=())

    def _arith_select(self, op: Op) -> None:
        if len(op.operands) == 3 and op.operands[1] in self.of:
            self.of[op.results[0]] = self.of[op.operands[1]]

    def _memref_subview(self, op: Op) -> None:
        groups = _groups(op.text[: op.text.index(" : memref<")])
        source = self[op.operands[0]]
        dims, position = [], 1 + sum(part.startswith("%") for part in groups[0])
        for part in groups[1]:
            if part.startswith("%"):
                dims.append(self.size(op.operands[position]))
                position += 1
            else:
                dims.append(int(part))
        bound = tuple(size if isinstance(size, int) else whole for size, whole in zip(dims, source.bound, strict=True))
        kept = self._kept(op, dims)
        self.of[op.results[0]] = replace(
            source,
            dims=tuple(dims[i] for i in kept),
            bound=tuple(bound[i] for i in kept),
            offset=source.offset
            if all(part == "0" for part in groups[0])
            else None
            if source.space != "gm"
            else source.offset,
        )

    @staticmethod
    def _kept(op: Op, dims: "list[int | str]") -> list[int]:
        """Dimensions that a rank-reducing view keeps: it drops some of size 1."""
        shape = op.memref().shape
        kept: list[int] = []
        for i, size in enumerate(dims):
            left, needed = len(dims) - i, len(shape) - len(kept)
            if needed and (size == shape[len(kept)] or shape[len(kept)] is None) and not (size == 1 and left > needed):
                kept.append(i)
            elif size != 1:
                raise ParseError(f"view not understood: {op.text[:200]}")
        return kept

    def _memref_reinterpret_cast(self, op: Op) -> None:
        source = self[op.operands[0]]
        offset, sizes, _ = _groups(op.text[: op.text.index(" : memref<")])
        position = 1 + sum(part.startswith("%") for part in offset)
        dims: list[int | str] = []
        for part in sizes:
            if part.startswith("%"):
                dims.append(self.size(op.operands[position]))
                position += 1
            else:
                dims.append(int(part))
        bound = tuple(size if isinstance(size, int) else None for size in dims)
        self.of[op.results[0]] = replace(source, dims=tuple(dims), bound=bound)

    def _memref_collapse_shape(self, op: Op) -> None:
        source, dims, bound = self[op.operands[0]], [], []
        for group in re.findall(r"\[([\d, ]+)\]", op.text[: op.text.index(" : memref<")]):
            members = [int(i) for i in group.split(",")]
            dims.append(_product([source.dims[i] for i in members], op))
            whole = [source.bound[i] for i in members]
            bound.append(None if any(size is None for size in whole) else math.prod(size or 0 for size in whole))
        if not dims:
            dims, bound = [1], [1]
        self.of[op.results[0]] = replace(source, dims=tuple(dims), bound=tuple(bound))

    def _memref_expand_shape(self, op: Op) -> None:
        source = self[op.operands[0]]
        shape = re.search(r"output_shape \[([^\]]*)\]", op.text)
        if shape is None:
            raise ParseError(f"expansion not understood: {op.text[:200]}")
        values = iter(op.operands[1:])
        parts = [part.strip() for part in shape.group(1).split(",")]
        dims = tuple(self.size(next(values)) if part.startswith("%") else int(part) for part in parts)
        bound = tuple(size if isinstance(size, int) else None for size in dims)
        if None in bound:
            # One dynamic size in an expansion of a buffer whose full size is known.
            known = math.prod(size for size in bound if size is not None)
            whole = None if None in source.bound else math.prod(size or 0 for size in source.bound)
            if bound.count(None) == 1 and whole is not None and known:
                bound = tuple(whole // known if size is None else size for size in bound)
        self.of[op.results[0]] = replace(source, dims=dims, bound=bound)

    def kind(self, argument: str) -> int:
        """0 read, 1 written, 2 both, as the front end marked a pointer."""
        return self._kinds.get(argument, 2)


def _product(dims: "list[int | str]", op: Op) -> "int | str":
    numbers = [size for size in dims if isinstance(size, int)]
    names = [size for size in dims if isinstance(size, str)]
    if not names:
        return math.prod(numbers)
    # A product with run-time sizes stays a product: `*`-joined names and one number, which `count.py` evaluates.
    number = math.prod(numbers)
    return "*".join([*names, str(number)]) if number != 1 or len(names) > 1 else names[0]


def _with_sizes(buffer: Buffer, sizes: "list[int | str]") -> Buffer:
    """Puts the sizes that an operation lists in the place of its type's unknown ones."""
    given = iter(sizes)
    dims = tuple(next(given, "?") if size == "?" else size for size in buffer.dims)
    return replace(buffer, dims=dims, bound=tuple(size if isinstance(size, int) else None for size in dims))


def _groups(text: str) -> list[list[str]]:
    """The bracketed lists of a subview or reinterpret cast, as lists of texts."""
    return [[part.strip() for part in group.split(",") if part.strip()] for group in re.findall(r"\[([^\]]*)\]", text)]


def argument_names(function: Function, names: list[str] | tuple[str, ...] = ()) -> dict[str, str]:
    """Value -> name of each argument of a device function: the kernel's own names where they are given."""
    values = [value for value, _ in function.arguments]
    if "hacc.entry" not in function.attributes:
        return {value: value for value in values}
    own = values[FIXED_ARGUMENTS:-3]
    fixed = dict(zip(values, ("ffts", "lock", "workspace"), strict=False))
    grid = dict(zip(values[-3:], ("grid_x", "grid_y", "grid_z"), strict=True))
    if names and len(names) != len(own):
        raise ParseError(f"{function.name} has {len(own)} arguments, the kernel {len(names)}: {', '.join(names)}")
    return {**{value: value for value in own}, **dict(zip(own, names, strict=False)), **fixed, **grid}
