"""Scalar operations on Python numbers: integers wrap at their width, floats are rounded to their type."""

import math
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from fla_npu.compiler.hivm import Op
from fla_npu.compiler.integers import BITS, ORDER, SIGNED, UNSIGNED, unsigned, wrapped
from fla_npu.compiler.simulator.memory import SimulationError, bf16_bits, bf16_values

Function = Callable[..., Any]


def rounded(value: float, kind: str) -> float:
    """A float of the type that is nearest to a number."""
    if kind == "bf16":
        return float(bf16_values(bf16_bits(np.array([value], np.float32)))[0])
    with np.errstate(over="ignore"):
        return float(np.float16(value) if kind == "f16" else np.float32(value) if kind == "f32" else value)


def _checked(function: Callable[[int, int], int], a: int, b: int) -> int:
    try:
        return function(a, b)
    except ZeroDivisionError:
        raise SimulationError("division by zero") from None


def _divide(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float64(a) / np.float64(b))


def _maximum(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _minimum(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else min(a, b)


def _number_of(pick: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: b if math.isnan(a) else a if math.isnan(b) else pick(a, b)


_FLOAT: dict[str, Callable[..., float]] = {
    "arith.addf": lambda a, b: a + b,
    "arith.subf": lambda a, b: a - b,
    "arith.mulf": lambda a, b: a * b,
    "arith.divf": _divide,
    "arith.negf": lambda a: -a,
    "arith.maximumf": _maximum,
    "arith.minimumf": _minimum,
    "arith.maxnumf": _number_of(max),
    "arith.minnumf": _number_of(min),
    "math.fma": lambda a, b, c: a * b + c,
}
_MATH: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "absf": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "roundeven": np.rint,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


def _quiet(function: Callable[[Any], Any], value: float) -> float:
    with np.errstate(all="ignore"):
        return float(function(np.float64(value)))


def constant(op: Op) -> Any:
    """The value of an `arith.constant`, floats exactly as they are written, hexadecimal ones included."""
    match = re.search(r"arith\.constant (?:\{[^}]*\} )?(\S+)(?: : (\w+))?", op.text)
    if match is None or match.group(1).startswith("dense"):
        raise SimulationError(f"constant not understood: {op.text[:120]}")
    text, kind = match.group(1), match.group(2) or "i1"
    if text in ("true", "false"):
        return int(text == "true")
    if kind in BITS:
        return int(text)
    if text.startswith("0x"):
        bits = int(text, 16)
        if kind == "f32":
            return float(struct.unpack("<f", struct.pack("<I", bits))[0])
        if kind == "f16":
            return float(struct.unpack("<e", struct.pack("<H", bits))[0])
        return float(bf16_values(np.array([bits], np.uint16))[0])
    return rounded(float(text), kind)


def compute(op: Op) -> Function | None:
    """A scalar operation as a function of its operands, None where it is something else."""
    kinds = re.findall(r" : ([\w<>]+)(?: to (\w+))?", op.text)
    kind, target = kinds[-1] if kinds else ("", "")
    prefix, _, name = op.name.partition(".")
    if op.name in _FLOAT:
        apply = _FLOAT[op.name]
        return lambda *operands: rounded(apply(*operands), kind)
    if prefix == "math" and name in _MATH:
        function = _MATH[name]
        return lambda a: rounded(_quiet(function, a), kind)
    if prefix == "math" and name == "absi":
        return lambda a: wrapped(abs(a), kind)
    if prefix != "arith":
        return None
    if name in SIGNED:
        integer = SIGNED[name]
        return lambda a, b: wrapped(_checked(integer, a, b), kind)
    if name in UNSIGNED:
        natural = UNSIGNED[name]
        return lambda a, b: wrapped(_checked(natural, unsigned(a, kind), unsigned(b, kind)), kind)
    if name in ("cmpi", "cmpf"):
        return _comparison(op, name, kind)
    if name == "select":
        return lambda condition, first, second: first if condition else second
    return _conversion(name, kind, target)


def _comparison(op: Op, name: str, kind: str) -> Function:
    match = re.search(r"cmp[if] (\w+)", op.text)
    predicate = match.group(1) if match else ""
    if predicate in ("eq", "ne") and name == "cmpi":
        return lambda a, b: int(ORDER[predicate](a, b))
    order = ORDER.get(predicate[1:])
    if order is None or predicate[0] not in ("su" if name == "cmpi" else "ou"):
        raise SimulationError(f"comparison not understood: {op.text[:120]}")
    if name == "cmpi":
        if predicate[0] == "s":
            return lambda a, b: int(order(a, b))
        return lambda a, b: int(order(unsigned(a, kind), unsigned(b, kind)))
    unordered = int(predicate[0] == "u")
    return lambda a, b: unordered if math.isnan(a) or math.isnan(b) else int(order(a, b))


def _conversion(name: str, kind: str, target: str) -> Function | None:
    if name in ("extsi", "index_cast", "trunci"):
        # The sign bit of an i1 is its value: extended with sign, 1 is -1.
        sign = -1 if kind == "i1" and name != "trunci" else 1
        return lambda a: wrapped(sign * a, target)
    if name in ("extui", "index_castui"):
        return lambda a: wrapped(unsigned(a, kind), target)
    if name == "sitofp":
        return lambda a: rounded(float(-a if kind == "i1" else a), target)
    if name == "uitofp":
        return lambda a: rounded(float(unsigned(a, kind)), target)
    if name in ("fptosi", "fptoui"):
        return lambda a: wrapped(0 if math.isnan(a) else int(a), target)
    if name in ("extf", "truncf"):
        return lambda a: rounded(a, target)
    if name == "bitcast" and {kind, target} == {"i32", "f32"}:
        if kind == "i32":
            return lambda a: float(struct.unpack("<f", struct.pack("<i", a))[0])
        return lambda a: int(struct.unpack("<i", struct.pack("<f", a))[0])
    return None
