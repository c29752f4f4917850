"""Frozen dataclasses from plain JSON, by their annotations."""

from dataclasses import fields, is_dataclass
from math import inf
from reprlib import repr as brief
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def decoded(value: Any, kind: Any, at: str) -> Any:
    """A value as what a type annotation says.

    Args:
        value: of plain JSON.
        kind: a dataclass whose fields are of these kinds, a tuple, a union with None, a Literal, or a plain type.
        at: its name in messages.

    Raises:
        ValueError: it is something else, a number that is negative or not finite, or one that a dataclass refuses; the
            message names the place.
    """
    if is_dataclass(kind) and isinstance(kind, type):
        names = [field.name for field in fields(kind)]
        if not isinstance(value, dict) or set(value) != set(names):
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{at} must have {', '.join(names)}, got {brief(found)}")
        hints = get_type_hints(kind)
        values = {name: decoded(value[name], hints[name], f"{at}.{name}") for name in names}
        try:
            return kind(**values)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from error
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        kinds = arguments if arguments[-1] is not Ellipsis else arguments[:1] * len(value)
        if len(kinds) == len(value):
            pairs = enumerate(zip(value, kinds, strict=True))
            return tuple(decoded(one, inner, f"{at}[{i}]") for i, (one, inner) in pairs)
    if origin is UnionType:
        if value is None and NoneType in arguments:
            return None
        return decoded(value, next(one for one in arguments if one is not NoneType), at)
    if origin is Literal and value in arguments:
        return value
    if kind in (int, float) and type(value) is kind and not 0 <= value < inf:
        raise ValueError(f"{at} must be finite and not negative, got {brief(value)}")
    if isinstance(kind, type) and type(value) is kind:
        return value
    # `repr` would follow lists in lists without end.
    raise ValueError(f"{at} must be {getattr(kind, '__name__', kind)}, got {brief(value)}")
