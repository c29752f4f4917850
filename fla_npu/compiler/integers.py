"""Integer arithmetic of the final IR (`arith`), for evaluation and simulation. Division by zero raises as in Python."""

from collections.abc import Callable
from typing import Any

BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64}


def wrapped(value: int, kind: str) -> int:
    """Two's complement of the type's width; one bit is 0 or 1."""
    bits = BITS[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value


def unsigned(value: int, kind: str) -> int:
    """What the bits of a number say without a sign."""
    return value & ((1 << BITS[kind]) - 1)


def _quotient(a: int, b: int) -> int:
    """Rounded towards zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


SIGNED: dict[str, Callable[[int, int], int]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": _quotient,
    "remsi": lambda a, b: a - b * _quotient(a, b),
    "floordivsi": lambda a, b: a // b,
    "ceildivsi": lambda a, b: -(-a // b),
    "minsi": min,
    "maxsi": max,
    "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b,
    "xori": lambda a, b: a ^ b,
    "shli": lambda a, b: a << b,
    "shrsi": lambda a, b: a >> b,
}
UNSIGNED: dict[str, Callable[[int, int], int]] = {
    "divui": lambda a, b: a // b,
    "remui": lambda a, b: a % b,
    "minui": min,
    "maxui": max,
    "shrui": lambda a, b: a >> b,
    "ceildivui": lambda a, b: -(-a // b),
}
ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
