"""The memories of a chip as bytes, and views of them: what two buffers at one place hold is the same."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NUMPY: dict[str, Any] = {
    "i8": np.int8,
    "i16": np.int16,
    "f16": np.float16,
    "bf16": np.uint16,
    "i32": np.int32,
    "f32": np.float32,
    "i64": np.int64,
}
"""How each type lies in memory. numpy has no bf16: its bits are kept as `uint16`."""

POISON = 0xFF
"""Every byte of memory that nothing was written to. As fp32, fp16 and bf16 it reads NaN, as an integer -1."""


class SimulationError(RuntimeError):
    """The program does something that a device can not do, or that has no defined result."""


def bf16_bits(values: Array) -> Array:
    """fp32 rounded to bf16, to nearest and ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    """The fp32 numbers that bf16 bits stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Memory:
    """One address space. `granule` is the unit in bytes in which the hazard check remembers accesses."""

    def __init__(self, name: str, data: Array, space: str, granule: int) -> None:
        self.name, self.data, self.space, self.granule = name, data, space, granule

    @classmethod
    def empty(cls, name: str, size: int, space: str, granule: int) -> "Memory":
        return cls(name, np.full(size, POISON, np.uint8), space, granule)


@dataclass(frozen=True)
class View:
    """A strided part of a memory. `base` is its pointer in bytes, `offset` counts elements from there."""

    memory: Memory
    base: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def space(self) -> str:
        return self.memory.space

    @property
    def size(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    def __str__(self) -> str:
        sizes = "x".join(str(extent) for extent in self.shape)
        return f"{sizes}x{self.dtype} at byte {self.start_bit() // 8} of {self.memory.name}"

    def part(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> "View":
        return replace(self, offset=offset, shape=shape, strides=strides)

    def start_bit(self) -> int:
        return self.base * 8 + self.offset * self.item_bits

    @property
    def item_bits(self) -> int:
        return 1 if self.dtype == "i1" else int(np.dtype(NUMPY[self.dtype]).itemsize) * 8

    def raw(self) -> Array:
        """The elements in place, as they lie in memory."""
        kind = np.dtype(NUMPY[self.dtype])
        start = self.base + self.offset * kind.itemsize
        try:
            if start < 0:
                raise ValueError
            return np.ndarray(
                self.shape, kind, self.memory.data.data, start, tuple(stride * kind.itemsize for stride in self.strides)
            )
        except (ValueError, TypeError):
            raise SimulationError(f"access outside memory: {self}, which has {self.memory.data.size} bytes") from None

    def get(self) -> Array:
        """A copy of the elements as numbers; bf16 as fp32."""
        if self.dtype == "i1":
            bits = self._bits()
            return ((self.memory.data[bits >> 3] >> (bits & 7).astype(np.uint8)) & 1).astype(bool)
        raw = self.raw()
        return bf16_values(raw) if self.dtype == "bf16" else raw.copy()

    def put(self, values: Array) -> None:
        """Writes numbers, which are rounded to the view's type."""
        if values.shape != self.shape:
            raise SimulationError(f"result of shape {values.shape} does not fit {self}")
        if self.dtype == "i1":
            self._put_bits(values)
        elif self.dtype == "bf16":
            self.raw()[...] = bf16_bits(values.astype(np.float32))
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                self.raw()[...] = values.astype(NUMPY[self.dtype])

    def poison(self) -> None:
        """What a scratch buffer holds after its use."""
        if self.dtype == "i1":
            self._put_bits(np.ones(self.shape, bool))
        elif self.size:
            raw = self.raw()
            raw[...] = np.frombuffer(b"\xff" * raw.itemsize, raw.dtype)[0]

    def _bits(self) -> Array:
        positions = np.full((), self.base * 8 + self.offset, np.int64)
        for extent, stride in zip(self.shape, self.strides, strict=True):
            positions = positions[..., None] + np.arange(extent, dtype=np.int64) * stride
        positions = positions.reshape(self.shape)
        if positions.size and not 0 <= positions.min() <= positions.max() < self.memory.data.size * 8:
            raise SimulationError(f"access outside memory: {self}, which has {self.memory.data.size} bytes")
        return positions

    def _put_bits(self, values: Array) -> None:
        positions = self._bits()
        if not positions.size:
            return
        first, last = int(positions.min()) >> 3, (int(positions.max()) >> 3) + 1
        bits = np.unpackbits(self.memory.data[first:last], bitorder="little")
        bits[positions - first * 8] = values
        self.memory.data[first:last] = np.packbits(bits, bitorder="little")


@lru_cache(maxsize=50_000)
def granules(
    start: int, shape: tuple[int, ...], strides: tuple[int, ...], bits: int, granule: int
) -> "slice | Array | None":
    """The granules that a view touches, None for an empty one. `start` is in bits."""
    if 0 in shape:
        return None
    dims = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent > 1]
    run = 1
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    unit = granule * 8
    starts = np.full((), start, np.int64)
    for extent, stride in dims:
        starts = starts[..., None] + np.arange(extent, dtype=np.int64) * (stride * bits)
    first, last = starts.ravel() // unit, (starts.ravel() + run * bits - 1) // unit
    if first.size == 1:
        return slice(int(first[0]), int(last[0]) + 1)
    longest = int((last - first).max()) + 1
    return np.unique(np.minimum(first[:, None] + np.arange(longest), last[:, None]))


def touched(view: View) -> "slice | Array | None":
    """The granules of its memory that a view touches."""
    return granules(view.start_bit(), view.shape, view.strides, view.item_bits, view.memory.granule)
