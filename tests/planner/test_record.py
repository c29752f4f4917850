"""Dataclasses from plain JSON: exactly what was written comes back, anything else is named."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import pytest

from fla_npu.planner.record import decoded


@dataclass(frozen=True)
class Inner:
    size: int

    def __post_init__(self) -> None:
        if self.size > 9:
            raise ValueError(f"size must be at most 9, got {self.size}")


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    inner: tuple[Inner, ...]
    pair: tuple[str, float] | None


MADE = Outer("x", "b", (Inner(1), Inner(2)), ("y", 0.5))
RECORD = {"name": "x", "kind": "b", "inner": [{"size": 1}, {"size": 2}], "pair": ["y", 0.5]}


def test_a_record_gives_its_dataclass():
    assert decoded(RECORD, Outer, "outer") == MADE
    assert decoded({**RECORD, "pair": None}, Outer, "outer").pair is None
    assert asdict(MADE)["inner"] == ({"size": 1}, {"size": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "outer.name must be str, got 1"),
        ({"kind": "c"}, "outer.kind must be .* got 'c'"),
        ({"inner": {}}, "outer.inner must be .*tuple.* got {}"),
        ({"inner": [{"size": 1}, {}]}, r"outer.inner\[1\] must have size, got \[\]"),
        ({"inner": [{"size": True}]}, r"outer.inner\[0\].size must be int, got True"),
        ({"inner": [{"size": -1}]}, r"outer.inner\[0\].size must be finite and not negative, got -1"),
        ({"inner": [{"size": 10}]}, r"outer.inner\[0\]: size must be at most 9, got 10"),
        ({"pair": ["y"]}, "outer.pair must be "),
        ({"pair": ["y", 1]}, r"outer.pair\[1\] must be float, got 1"),
        ({"pair": ["y", float("inf")]}, r"outer.pair\[1\] must be finite and not negative, got inf"),
        ({"more": 1}, "outer must have name, kind, inner, pair, got "),
    ],
)
def test_what_is_something_else_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        decoded({**RECORD, **change}, Outer, "outer")
