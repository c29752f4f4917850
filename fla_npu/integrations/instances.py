"""Objects that exist already: layers that were built before `fla_npu.enable()`."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instances(wanted: Callable[[type], bool]) -> list[Any]:
    """Objects that the garbage collector tracks and whose class is wanted.

    The collector does not list what `gc.freeze()` has put aside, as servers do with a loaded model. Then they are
    searched from what it does list, from modules and from the variables of functions that run; what extension modules
    alone hold is not found.
    """
    objects: list[Any] = gc.get_objects()
    if gc.get_freeze_count():
        objects = _reachable([*objects, sys.modules, *_local_variables()])
    return [x for x in objects if wanted(type(x))]


def _reachable(start: list[Any]) -> list[Any]:
    """Tracked objects among the given ones and what they refer to, directly or not."""
    reached: dict[int, Any] = {}
    level = start
    while level:
        fresh = {id(x): x for x in level if id(x) not in reached and gc.is_tracked(x)}
        reached |= fresh
        level = gc.get_referents(*fresh.values())
    return list(reached.values())


def _local_variables() -> list[Any]:
    """Of all functions that run, in all threads: the collector does not look into their frames."""
    found: list[Any] = []
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            found += frame.f_locals.values()
            frame = frame.f_back
    return found
