"""The compiler's final program as a tree: functions, blocks and operations with their operands and source lines.

Reads the textual `module.hivm.opt.mlir` of bishengir 1.1 and 1.2. Only what the counts need is understood; an operation
of an unknown kind becomes an `Op` like any other and is an error only where its result is asked for.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from fla_npu.compiler import affine

ITEM_BITS = {"i1": 1, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64, "index": 64}

Dims = tuple["int | str", ...]
"""Sizes of a buffer; a size known only at run time is the name of the value that holds it."""


class ParseError(ValueError):
    """Text that is not a program of the supported kind."""


@dataclass(frozen=True)
class MemRef:
    """A `memref` type: None is a size known only at run time."""

    shape: tuple[int | None, ...]
    dtype: str
    space: str

    def __str__(self) -> str:
        return "x".join([*("?" if size is None else str(size) for size in self.shape), self.dtype])


@dataclass(eq=False)
class Block:
    """Operations that run one after the other, and the values a loop or a branch passes in."""

    arguments: list[str] = field(default_factory=list)
    ops: list["Op"] = field(default_factory=list)
    parent: "Op | None" = None

    def walk(self) -> "Iterator[Op]":
        """Every operation in the text, inner ones included."""
        for op in self.ops:
            yield op
            for region in op.regions:
                yield from region.walk()


@dataclass(eq=False)
class Op:
    """One operation. `operands` are the values it reads, in order, without those of its regions."""

    name: str
    results: list[str]
    operands: list[str]
    text: str
    block: Block
    regions: list[Block] = field(default_factory=list)
    attributes: str = ""
    location: str = ""

    @property
    def callee(self) -> str:
        match = re.search(r"call @(\w+)", self.text)
        return match.group(1) if match else ""

    def memref(self, position: int = -1) -> MemRef:
        """The memref type at a position of the operation's text; the last one is that of its result."""
        found = memrefs(self.text)
        if not found:
            raise ParseError(f"no memref type in: {self.text[:200]}")
        return found[position]

    def loops(self) -> "list[Op]":
        """Loops around this operation, outermost first."""
        found: list[Op] = []
        parent = self.block.parent
        while parent is not None:
            if parent.name in ("scf.for", "scf.while"):
                found.insert(0, parent)
            parent = parent.block.parent
        return found


@dataclass(eq=False)
class Function:
    """A function with a body. `arguments` are its values with their type text."""

    name: str
    arguments: list[tuple[str, str]]
    core: str
    attributes: str
    body: Block


@dataclass(eq=False)
class Module:
    """The whole program."""

    functions: list[Function]
    maps: dict[str, affine.AffineMap]
    limits: dict[str, int]
    """`UB_SIZE` and so on in bits, `VECTOR_CORE_COUNT` and so on."""

    def kernels(self) -> list[Function]:
        """The functions that run on the device, cube before vector."""
        found = [f for f in self.functions if f.core in ("AIC", "AIV") and "DEVICE" in f.attributes]
        return sorted(found, key=lambda f: f.core)

    def host_value(self, suffix: str) -> int | None:
        """What the host function with this name returns, None where there is none."""
        for function in self.functions:
            if function.name.endswith(suffix):
                constants = [op for op in function.body.ops if op.name == "arith.constant"]
                if len(constants) == 1:
                    return int(constant(constants[0]))
        return None


def constant(op: Op) -> int | float:
    """The value of an `arith.constant`."""
    match = re.search(r"arith\.constant (?:\{[^}]*\} )?(\S+)", op.text)
    if match is None:
        raise ParseError(f"constant not understood: {op.text[:200]}")
    text = match.group(1)
    if text in ("true", "false"):
        return int(text == "true")
    if text.startswith("0x"):
        return float("nan")
    return float(text) if re.search(r"[.eE]", text) else int(text)


@lru_cache(maxsize=100_000)
def memrefs(text: str) -> tuple[MemRef, ...]:
    """Every memref type in a text, in order."""
    found = []
    for match in re.finditer(r"memref<((?:[\d?]+x)*)(\w+)", text):
        tail = text[match.end() : _closing(text, match.start() + len("memref"))]
        space = re.search(r"address_space<(\w+)>", tail)
        shape = tuple(None if size == "?" else int(size) for size in match.group(1).split("x")[:-1])
        found.append(MemRef(shape, match.group(2), space.group(1) if space else ""))
    return tuple(found)


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`."""
    depth = 0
    pairs = {"<": 1, "(": 1, "[": 1, "{": 1, ">": -1, ")": -1, "]": -1, "}": -1}
    for position in range(start, len(text)):
        character = text[position]
        if character == ">" and text[position - 1] == "-":
            continue
        depth += pairs.get(character, 0)
        if depth == 0:
            return position
    raise ParseError(f"bracket not closed: {text[start : start + 80]}")


_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_LOCATION = re.compile(r"\s+loc\((.*)\)$")


def parse(text: str) -> Module:
    """Reads a module.

    Raises:
        ParseError: the text is not such a module.
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.position = 0
        self.locations = _locations(text)
        self.scopes: list[dict[str, str]] = []
        self.taken: set[str] = set()

    def module(self) -> Module:
        maps, limits, functions = {}, {}, []
        while self.position < len(self.lines):
            line = self.lines[self.position]
            self.position += 1
            declared = re.match(r"(#map\d*) = affine_map<(.*)>$", line)
            if declared:
                maps[declared.group(1)] = affine.parse(declared.group(2))
            elif line.startswith("module"):
                limits = {name: int(value) for name, value in re.findall(r'"(\w+)", (\d+) : i32', line)}
            elif re.match(r"\s*func\.func private ", line):
                continue
            elif re.match(r"\s*func\.func ", line):
                functions.append(self.function(line))
        if not functions:
            raise ParseError("text must be a module with functions")
        return Module(functions, maps, limits)

    def function(self, line: str) -> Function:
        name = re.search(r"@(\w+)", line)
        if name is None or not line.rstrip().endswith("{"):
            raise ParseError(f"function not understood: {line[:200]}")
        start = line.index("(")
        stop = _closing(line, start)
        self.scopes, self.taken = [{}], set()
        arguments = []
        for part in _split(line[start + 1 : stop]):
            value, _, kind = part.partition(":")
            arguments.append((self.define(value.strip()), kind.strip()))
        core = re.search(r"func_core_type<(\w+)>", line)
        body = Block()
        self.block(body)
        return Function(name.group(1), arguments, core.group(1) if core else "", line[stop:], body)

    def block(self, block: Block) -> str:
        """Reads operations into a block up to the line that closes it, and returns that line."""
        while True:
            if self.position >= len(self.lines):
                raise ParseError("text ends inside a function")
            line = self.lines[self.position].strip()
            self.position += 1
            if line.startswith("}"):
                return line
            if line.startswith("^bb"):
                self.label(line, block)
            elif line and not line.startswith("//"):
                self.op(line, block)

    def label(self, line: str, block: Block) -> None:
        # A single entry block of a region names its arguments here; other blocks come from unstructured control flow,
        # which is kept as text only.
        for value in re.findall(r"(%[\w$.-]+):", line):
            block.arguments.append(self.define(value))

    def op(self, line: str, block: Block) -> None:
        location = _LOCATION.search(line)
        text = line[: location.start()] if location else line
        where = self.location(location.group(1)) if location else ""
        names, rest = [], text
        head = re.match(r"((?:%[\w$.-]+(?::\d+)?(?:, )?)+) = ", text)
        if head:
            rest = text[head.end() :]
            for value, count in re.findall(r"(%[\w$.-]+)(?::(\d+))?", head.group(1)):
                names += [f"{value}#{i}" for i in range(int(count))] if count else [value]
        kind = re.match(r'"?([\w.]+)"?', rest)
        if kind is None:
            raise ParseError(f"operation not understood: {line[:200]}")
        name = "func.call" if kind.group(1) == "call" else kind.group(1)
        opens = rest.endswith("{")
        op = Op(name, [], [], rest, block, location=where)
        block.ops.append(op)
        if opens:
            self.regions(op, rest)
        else:
            op.operands = [self.use(value) for value in _VALUE.findall(rest)]
            op.attributes = rest
        op.results = [self.define(value) for value in names]

    def regions(self, op: Op, rest: str) -> None:
        """Reads the bodies of a loop or branch. Values that its head introduces belong to its first body."""
        introduced: list[str] = []
        if op.name == "scf.for":
            introduced = re.findall(r"scf\.for (%[\w$.-]+)", rest)
        carried = re.search(r"(?:iter_args|scf\.while )\((.*?)\)", rest)
        if carried and op.name != "scf.if":
            introduced += re.findall(r"(%[\w$.-]+) =", carried.group(1))
        op.operands = [self.use(value) for value in _VALUE.findall(rest) if value not in introduced]
        while True:
            region = Block(parent=op)
            self.scopes.append({})
            region.arguments = [self.define(value) for value in introduced]
            introduced = []
            op.regions.append(region)
            closing = self.block(region)
            self.scopes.pop()
            if not closing.endswith("{"):
                break
        location = _LOCATION.search(closing)
        if location:
            op.location = self.location(location.group(1))
        op.attributes = closing[: location.start()] if location else closing

    def define(self, value: str) -> str:
        unique, number = value, 1
        while unique in self.taken:
            number += 1
            unique = f"{value}'{number}"
        self.taken.add(unique)
        self.scopes[-1][value] = unique
        return unique

    def use(self, value: str) -> str:
        for scope in reversed(self.scopes):
            if value in scope:
                return scope[value]
        return value

    def location(self, text: str) -> str:
        return self.locations.get(text, "") if text.startswith("#") else _place(text, self.locations)


def _locations(text: str) -> dict[str, str]:
    raw = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    found: dict[str, str] = {}
    for _ in range(3):
        for name, body in raw.items():
            found[name] = _place(body, found)
    return found


def _place(text: str, known: dict[str, str]) -> str:
    """`kernel.py:12` of a location; where calls were inlined, the innermost one first."""
    places = []
    for path, line, alias in re.findall(r'"([^"]*)":(\d+):\d+|(#loc\d*)', text):
        place = known.get(alias, "") if alias else f"{path.rsplit('/', 1)[-1]}:{line}" if line != "0" else ""
        if place and place not in places:
            places.append(place)
    return " < ".join(places)


def _split(text: str) -> list[str]:
    """Splits at the commas outside every bracket."""
    parts, depth, last = [], 0, 0
    for position, character in enumerate(text):
        if character in "<([{":
            depth += 1
        elif character in ")]}" or (character == ">" and text[position - 1] != "-"):
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[last:position])
            last = position + 1
    tail = text[last:]
    return [*parts, tail] if tail.strip() else parts
