"""What a plan is asked for, checked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, get_args

from fla_npu.planner.chips import chip as find_chip
from fla_npu.planner.dataflow import ITEMSIZE, RECURRENCES

Precision = Literal["exact", "fast"]

MOST_SEQUENCES = 4096
"""Sequences of a call that can be planned: so many unequal ones still take less than two seconds."""

MOST_TOKENS = 2**31 - 1
"""Tokens of a sequence: the kernels hold its length in 32 bits."""


@dataclass(frozen=True)
class Request:
    """What was asked for, with every default filled in.

    Raises:
        TypeError: a name is not a str, or `bounded` not a bool.
        ValueError: an argument is not among those that `plan` names.
    """

    op: str
    chip: str
    """Its name in `planner.chips`."""
    heads: int
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    K: int
    V: int
    dtype: str
    precision: Precision
    bounded: bool

    def __post_init__(self) -> None:
        for name in ("op", "dtype", "precision"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a str, got {type(getattr(self, name)).__name__}")
        if type(self.bounded) is not bool:
            raise TypeError(f"bounded must be a bool, got {self.bounded!r}")
        if self.op not in RECURRENCES:
            raise ValueError(f"op must be one of {', '.join(RECURRENCES)}, got {self.op!r}")
        if not self.bounded and RECURRENCES[self.op].decay != "channel":
            raise ValueError(f"bounded must be True for {self.op}: a bound matters to decays of key channels only")
        chip = find_chip(self.chip)
        for name in ("heads", "K", "V"):
            _at_least(name, getattr(self, name), 1)
        _at_most("lengths", len(self.lengths), MOST_SEQUENCES, "sequences")
        for length in self.lengths:
            _at_least("lengths", length, 0)
            _at_most("lengths", length, MOST_TOKENS, "tokens each")
        if not any(self.lengths):
            raise ValueError(f"lengths must have at least one token, got {list(self.lengths)}")
        dtypes = [one for one in chip.matrix_dtypes if one in ITEMSIZE]
        if self.dtype not in dtypes:
            known = " or ".join(dtypes)
            raise ValueError(f"dtype must be one that {chip.name} multiplies, {known}, got {self.dtype!r}")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be exact or fast, got {self.precision!r}")


def token_counts(lengths: Sequence[int] | None, seq: int | None, batch: int) -> tuple[int, ...]:
    """Tokens of each sequence: `lengths`, or `batch` times `seq`."""
    if (lengths is None) == (seq is None):
        given = "neither" if seq is None else "both"
        raise ValueError(f"lengths or seq must say how many tokens there are, got {given}")
    batch = integer("batch", batch)
    if seq is not None:
        seq = integer("seq", seq)
        _at_least("seq", seq, 1)
        _at_least("batch", batch, 1)
        _at_most("batch", batch, MOST_SEQUENCES, "sequences")
        return (seq,) * batch
    if batch != 1:
        raise ValueError(f"batch must be 1 where lengths name the sequences, got {batch}")
    if not isinstance(lengths, Iterable):
        raise TypeError(f"lengths must be a sequence of ints, got {type(lengths).__name__}")
    return tuple(integer("lengths", length) for length in lengths)


def integer(name: str, value: int) -> int:
    """A number as an int; of any integer type but bool."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def one_of(name: str, value: int | None, known: tuple[int, ...]) -> int | None:
    """A size of a chunk that was asked for."""
    if value is None:
        return None
    size = integer(name, value)
    if size not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {size}")
    return size


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _at_most(name: str, value: int, most: int, what: str) -> None:
    if value > most:
        raise ValueError(f"{name} must be at most {most:,} {what}, got {value:,}")
