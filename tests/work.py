"""How much a call does, counted: seconds say more of the machine and of its other users than of the code."""

import sys
from collections.abc import Callable
from typing import Any


def calls(function: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Functions, of Python and built in, that ``function(*args, **kwargs)`` calls: the same number on every machine."""
    made = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(before)
    return made
