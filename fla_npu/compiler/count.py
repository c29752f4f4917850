"""What each operation moves and computes, as terms whose sizes may be known only at run time."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fla_npu.compiler.buffers import Buffer, Buffers
from fla_npu.compiler.hivm import ITEM_BITS, Block, Function, Module, Op, ParseError

Key = tuple[str, ...]

_CUBE = re.compile(r"mma_tile_(\w+?)_to_\w+?(?:_t[ab])*(?:_hf32)?$")
_C_TYPES = {"float": "f32", "half": "f16", "bfloat16_t": "bf16", "int8_t": "i8", "int32_t": "i32", "int64_t": "i64"}


@dataclass(frozen=True)
class Term:
    """`scale * product(sizes)` of one quantity; `full` are the sizes of a full tile, None where nothing says."""

    key: Key
    scale: int
    sizes: tuple["int | str", ...] = ()
    full: tuple[int | None, ...] = ()
    bits: int = 8
    """The product counts pieces of this many bits; quantities in bytes are rounded up to whole bytes."""

    def names(self) -> list[str]:
        return [name for size in self.sizes if isinstance(size, str) for name in size.split("*") if name[:1] == "%"]

    def value(self, lookup: Callable[[str], int]) -> int:
        """The quantity for given run-time sizes."""
        return self._of([_size(size, lookup) for size in self.sizes])

    def full_value(self) -> int:
        """The quantity of a full tile.

        Raises:
            ParseError: the full tile's size is not in the program.
        """
        if any(size is None for size in self.full):
            raise ParseError(f"size of a full tile not known for {' '.join(self.key)}")
        return self._of([size or 0 for size in self.full])

    def _of(self, sizes: list[int]) -> int:
        return self.scale * -(-math.prod(sizes) * self.bits // 8)


def _size(size: "int | str", lookup: Callable[[str], int]) -> int:
    if isinstance(size, int):
        return size
    return math.prod(lookup(part) if part.startswith("%") else int(part) for part in size.split("*"))


@dataclass(frozen=True)
class Totals:
    """Quantities of some part of a program. Vector quantities are those of both vector cores of a program."""

    counts: Mapping[Key, int]

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(Counter(self.counts) + Counter(other.counts))

    def times(self, factor: int) -> "Totals":
        return Totals({key: factor * value for key, value in self.counts.items()})

    def sum(self, *prefix: str) -> int:
        """Sum of every quantity whose key starts so; `*` stands for any part."""
        return sum(
            value
            for key, value in self.counts.items()
            if all(want in ("*", have) for want, have in zip(prefix, key, strict=False)) and len(key) >= len(prefix)
        )

    def by(self, *prefix: str) -> dict[str, int]:
        """Quantities under a prefix, by the next part of their key."""
        found: Counter[str] = Counter()
        for key, value in self.counts.items():
            if key[: len(prefix)] == prefix and len(key) > len(prefix):
                found[key[len(prefix)]] += value
        return dict(sorted(found.items()))

    @cached_property
    def gm(self) -> dict[str, int]:
        """Bytes of global memory, by `core direction kind`; kind is `user` or `workspace`."""
        found: Counter[str] = Counter()
        for key, value in self.counts.items():
            if key[0] == "gm":
                found[" ".join(key[1:4])] += value
        return dict(sorted(found.items()))

    @cached_property
    def arguments(self) -> dict[str, dict[str, int]]:
        """Bytes read and written of each of the kernel's arguments."""
        found: dict[str, dict[str, int]] = {}
        for key, value in self.counts.items():
            if key[0] == "gm" and key[3] == "user":
                entry = found.setdefault(key[4], {"read": 0, "write": 0})
                entry[key[2]] += value
        return dict(sorted(found.items()))

    @property
    def user_read(self) -> int:
        return self.sum("gm", "*", "read", "user")

    @property
    def user_written(self) -> int:
        return self.sum("gm", "*", "write", "user")

    @property
    def workspace(self) -> int:
        """Workspace bytes, reads and writes together."""
        return self.sum("gm", "*", "*", "workspace")

    @property
    def l1_to_l0(self) -> int:
        return self.sum("l1_to_l0")

    @property
    def macs(self) -> int:
        return self.sum("macs")

    @property
    def syncs(self) -> int:
        return self.sum("syncs")

    @property
    def vector_elements(self) -> int:
        return self.sum("vector")

    def as_dict(self) -> dict[str, Any]:
        """The quantities in JSON's terms."""
        return {
            "gm_bytes": self.gm,
            "gm_bytes_by_argument": self.arguments,
            "on_core_bytes": self.by("on_core"),
            "l1_to_l0_bytes": self.l1_to_l0,
            "macs": self.by("macs"),
            "vector_elements": self.by("vector"),
            "calls": self.by("calls"),
            "syncs": self.by("syncs"),
            "scalar_accesses": self.by("scalar"),
        }


def gm_term(core: str, direction: str, buffer: Buffer, other: Buffer) -> Term:
    """Bytes of global memory; where its view says no size, the on-core side does."""
    kind = "workspace" if buffer.root == "workspace" else "user"
    dims, full = buffer.dims, buffer.bound
    if "?" in dims:
        dims = other.dims
    if None in full:
        full = other.bound
    return Term(("gm", core, direction, kind, buffer.root), 1, dims, full, buffer.item_bits)


def terms(op: Op, buffers: Buffers, core: str, vectors: Mapping[str, Totals] | None = None) -> list[Term]:
    """What one operation does; nothing for those that only compute addresses or wait.

    `vectors` are the work of the functions into which the compiler for A5 moves vector code.
    """
    register = re.match(r"ave\.hir\.(v\w+)$", op.name)
    if register and not register.group(1).startswith(("vload", "vstore", "vci")):
        lanes = re.search(r"vector<(\d+)x", op.text)
        return [Term(("vector", register.group(1)), int(lanes.group(1)))] if lanes else []
    if op.name == "hivm.hir.sync_block_set":
        pipe = re.search(r"\[<\w+>, <PIPE_(\w+)>", op.text)
        return [Term(("syncs", pipe.group(1) if pipe else "ALL"), 1)]
    if op.name in ("memref.load", "memref.store"):
        buffer = buffers[op.operands[op.name == "memref.store"]]
        return [Term(("scalar", f"{buffer.space or 'stack'} {op.name.removeprefix('memref.')}"), 1)]
    if op.name != "func.call":
        return []
    name, values = op.callee, op.operands
    if vectors and name in vectors:
        return [Term(key, value) for key, value in vectors[name].counts.items()]
    call = Term(("calls", family(name)), 1)
    if not _KNOWN.match(name):
        return [call]
    if name.startswith("nd2nz"):
        return [call, gm_term(core, "read", buffers[values[0]], buffers[values[1]])]
    if name.startswith("load_gm_to_"):
        return [call, gm_term(core, "read", buffers[values[0]], buffers[values[1]])]
    if name.startswith("fixpipe") and name.endswith("ubuf"):
        return [call, _on_core("l0c to ub", buffers[values[1]], buffers[values[0]])]
    if name.startswith("copy_ubuf_to_cbuf"):
        return [call, _on_core("ub to l1", buffers[values[0]], buffers[values[1]])]
    if name.startswith("fixpipe"):
        return [call, gm_term(core, "write", buffers[values[1]], buffers[values[0]])]
    if name.startswith("store_ubuf_to_gm"):
        return [call, gm_term(core, "write", buffers[values[1]], buffers[values[0]])]
    cube = _CUBE.match(name)
    if cube:
        return [call, *_cube_terms(op, buffers, cube.group(1))]
    target = destination(op)
    if target is None:
        return [call]
    wide = buffers[values[target]]
    if values[0] in buffers.of:
        wide = max(wide, buffers[values[0]], key=_elements)
    return [call, Term(("vector", family(name)), 1, wide.dims, wide.bound)]


def _on_core(way: str, buffer: Buffer, other: Buffer) -> Term:
    """Bytes that go between the vector and the cube part on the core (A5)."""
    full = other.bound if None in buffer.bound else buffer.bound
    return Term(("on_core", way), 1, other.dims if "?" in buffer.dims else buffer.dims, full, buffer.item_bits)


def _elements(buffer: Buffer) -> int:
    return math.prod(size or 1 for size in buffer.bound)


def _cube_terms(op: Op, buffers: Buffers, name: str) -> list[Term]:
    dtype = _C_TYPES.get(name, name)
    m, k, n = (buffers.size(value) for value in op.operands[3:6])
    a, c = buffers[op.operands[0]].bound, buffers[op.operands[6]].bound
    transposed = "_ta" in op.callee
    # Fractal layouts: C is [N/16, M/16, 16, 16]; A is [K/C0, M/16, 16, C0], and with _ta [M/C0, K/16, 16, C0].
    full_m, full_n = _times(c, 1, 2), _times(c, 0, 3)
    full_k = _times(a, 1, 2) if transposed else _times(a, 0, 3)
    full = tuple(size if isinstance(size, int) else tile for size, tile in ((m, full_m), (k, full_k), (n, full_n)))
    bits = ITEM_BITS[dtype]
    return [
        Term(("macs", dtype), 1, (m, k, n), full),
        Term(("l1_to_l0", "a"), 1, (m, k), (full[0], full[1]), bits),
        Term(("l1_to_l0", "b"), 1, (k, n), (full[1], full[2]), bits),
    ]


def _times(shape: tuple[int | None, ...], i: int, j: int) -> int | None:
    first, second = shape[i], shape[j]
    return None if first is None or second is None else first * second


def family(callee: str) -> str:
    """A library function's name without ranks and types: `vadd_1d_float` is `vadd`."""
    if callee.startswith("fixpipe"):
        return "fixpipe"
    if callee.startswith("mma_tile"):
        return "mma"
    if callee.startswith("nd2nz"):
        return "nd2nz"
    if callee.startswith("load_gm"):
        return "load"
    if callee.startswith("store_ubuf_to_gm"):
        return "store"
    if callee.startswith("vcast"):
        return "vcast"
    if callee.startswith("copy_ubuf"):
        return "copy_to_l1" if "cbuf" in callee else "copy"
    short = re.split(r"_(?:\d+d|vs|vv|sv|ss|align|unalign|with|without|to|r|ar|ra|rar)(?:_|$)", callee)[0]
    return re.sub(r"^enablevcg?_|_(?:float|half|bfloat16_t|u?int\d+_t|bool)$", "", short)


def destination(op: Op) -> int | None:
    """Which operand of a vector library call is written, None for a call that is not vector work.

    Sources come first, the destination next and a scratch buffer last; comparisons and casts with a mode have none.
    """
    name, count = op.callee, len(op.operands)
    if name.startswith(("set_l1", "init_", "debug", "print")):
        return None
    if name.startswith("arange"):
        return 0
    if name.startswith("vsel"):
        return 3
    if name.startswith("vcmp"):
        return 2
    if name.startswith("v") and not name.startswith("vcast"):
        return max(count - 2, 1)
    return 1 if count > 1 else None


@dataclass(frozen=True)
class Loop:
    """One loop of a device function, with what one iteration does, full tiles, loops of constant length included."""

    core: str
    path: str
    """`AIC.0.1`: the second loop in the first loop of the cube function."""
    location: str
    trips: int | None
    """Iterations where the program says, else None."""
    body: Totals
    has_inner: bool
    """Whether loops of unknown length are inside; their work is not in `body`."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "source": self.location,
            "trips": self.trips,
            "has_inner_loops": self.has_inner,
            "per_iteration": self.body.as_dict(),
        }


@dataclass(eq=False)
class Device:
    """One device function with its buffers and terms."""

    module: Module
    function: Function
    buffers: Buffers
    mixed: bool
    vectors: Mapping[str, Totals] = field(default_factory=dict)
    terms: dict[Block, list[Term]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @cached_property
    def structured(self) -> bool:
        """Whether loops are still loops; the compiler for A5 has made jumps of them."""
        return all(op.name not in ("cf.br", "cf.cond_br") for op in self.function.body.walk())

    @property
    def core(self) -> str:
        return self.function.core

    @property
    def copies(self) -> int:
        """Vector cores that run this function for one program."""
        return 2 if self.mixed and self.core == "AIV" else 1

    def sub_block_zero_only(self, op: Op) -> bool:
        """Whether a branch is taken by the first vector core alone."""
        if op.name != "scf.if" or not op.operands:
            return False
        if "limit_sub_block_id0" in op.attributes:
            return True
        condition = self.buffers.defining(op.operands[0])
        if condition is None or condition.name != "arith.cmpi" or " eq," not in condition.text:
            return False
        sides = [self._through_casts(value) for value in condition.operands]
        return any(side is not None and side.name == "hivm.hir.get_sub_block_idx" for side in sides)

    def _through_casts(self, value: str) -> Op | None:
        op = self.buffers.defining(value)
        while op is not None and op.name in ("arith.index_cast", "arith.trunci", "arith.extsi"):
            op = self.buffers.defining(op.operands[0])
        return op

    def trips(self, loop: Op) -> int | None:
        """Iterations of a loop between constants, None for others."""
        if loop.name != "scf.for":
            return None
        bounds = [self.buffers.constants.get(value) for value in loop.operands[:3]]
        if any(bound is None for bound in bounds):
            return None
        start, stop, step = (int(bound or 0) for bound in bounds)
        return max(0, -(-(stop - start) // step))

    def full(self, block: Block, copies: int | None = None) -> tuple[Totals, bool]:
        """What a block does in a full chunk, and whether loops of unknown length are left out.

        Branches for tail chunks are left out, of other branches the first arm counts.
        """
        copies = self.copies if copies is None else copies
        total: Counter[Key] = Counter()
        for term in self.terms[block]:
            # A hand-off that both vector cores signal is one hand-off.
            total[term.key] += term.full_value() * (1 if term.key[0] == "syncs" else copies)
        open_loops = False
        for op in block.ops:
            if not op.regions:
                continue
            factor: int | None = 1
            inner_copies = copies
            if op.name in ("scf.for", "scf.while"):
                factor = self.trips(op)
            elif op.name == "scf.if" and "unlikely_condition" in op.attributes:
                continue
            elif self.sub_block_zero_only(op):
                inner_copies = 1
            if factor is None:
                open_loops = True
                continue
            inner, inner_open = self.full(op.regions[0], inner_copies)
            total.update(inner.times(factor).counts)
            open_loops = open_loops or inner_open
        return Totals(total), open_loops

    def loops(self) -> Iterator[tuple[str, Op]]:
        """Every loop with its path."""
        yield from self._loops(self.function.body, self.core)

    def _loops(self, block: Block, prefix: str) -> Iterator[tuple[str, Op]]:
        for number, op in enumerate(self._flat(block)):
            path = f"{prefix}.{number}"
            yield path, op
            for region in op.regions:
                yield from self._loops(region, path)

    def _flat(self, block: Block) -> Iterator[Op]:
        """Loops directly in a block or in its branches."""
        for op in block.ops:
            if op.name in ("scf.for", "scf.while"):
                yield op
            else:
                for region in op.regions:
                    yield from self._flat(region)


def devices(module: Module, arguments: Iterable[str] = ()) -> list[Device]:
    """The device functions of a module with their terms; names of the kernel's arguments are optional."""
    kernels, names = module.kernels(), list(arguments)
    mixed = len({function.core for function in kernels}) == 2
    vectors = {}
    for function in module.functions:
        if "hivm.vector_function" in function.attributes:
            work = _vector_function(module, function)
            if work is not None:
                vectors[function.name] = work
    found = []
    for function in kernels:
        device = Device(module, function, Buffers(module, function, names), mixed, vectors)
        unknown: set[str] = set()
        _collect(function.body, device, unknown)
        device.unknown = tuple(sorted(unknown))
        found.append(device)
    return found


def _vector_function(module: Module, function: Function) -> Totals | None:
    """Work of one call of a vector function, None where it depends on the call."""
    from fla_npu.compiler.evaluate import EvaluationError, closed_totals

    device = Device(module, function, Buffers(module, function), False)
    _collect(function.body, device, set())
    try:
        body = closed_totals(device)
    except EvaluationError:
        return None
    return Totals({key: value for key, value in body.counts.items() if key[0] == "vector"})


_KNOWN = re.compile(
    r"v[a-z]|nd2nz|load_gm|store_ubuf|fixpipe|mma_tile|set_l1|broadcast|copy_ubuf|arange|transpose|cumsum|reduce|"
    r"enablevc|init_|gather|sort|interleave|deinterleave|concat|pad|mul_ext|cumprod"
)


def _collect(block: Block, device: Device, unknown: set[str]) -> None:
    found: list[Term] = []
    for op in block.ops:
        if op.name == "func.call" and not _KNOWN.match(op.callee) and op.callee not in device.vectors:
            unknown.add(op.callee)
        if device.structured:
            found += terms(op, device.buffers, device.core, device.vectors)
        for region in op.regions:
            _collect(region, device, unknown)
    device.terms[block] = found


def loops(device: Device) -> list[Loop]:
    """Every loop of a device function."""
    found = []
    for path, op in device.loops():
        body, open_loops = device.full(op.regions[-1])
        found.append(Loop(device.core, path, op.location, device.trips(op), body, open_loops))
    return found


def chunk_loop(device: Device) -> tuple[str, Op] | None:
    """The loop that does most of the hand-offs and matrix products itself: that of the chunks, in the kernels here.

    In a kernel for one kind of core it is the loop with most library calls. Loops of constant length count with the
    loop around them; of equals the innermost is chosen.
    """
    best: tuple[int, int, str, Op] | None = None
    for path, op in device.loops():
        body, _ = device.full(op.regions[-1], 1)
        weight = body.sum("calls", "mma") + body.syncs
        if not device.mixed:
            weight = body.sum("calls")
        if weight and device.trips(op) is None and (best is None or (weight, len(op.loops())) > best[:2]):
            best = (weight, len(op.loops()), path, op)
    return None if best is None else best[2:]
