"""How much a call does, counted: seconds say more of the machine and of its other users than of the code."""

import cProfile
from collections.abc import Callable
from typing import Any


def calls(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Functions, of Python and built in, that ``function(*args, **kwargs)`` calls: the same number on every machine."""
    profile = cProfile.Profile()
    profile.runcall(function, *args, **kwargs)
    return sum(entry.callcount for entry in profile.getstats())
