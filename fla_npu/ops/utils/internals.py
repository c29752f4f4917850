"""What the modules say that exist in FLA for parts of its kernels alone."""

from collections.abc import Callable
from typing import NoReturn


def steps_between_kernels(module: str, op: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` for `module` that tells why it is empty.

    Args:
        op: does as a whole what FLA's functions of this module do in part.
    """

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: FLA has steps between its kernels here; in this package an "
            f"op is one walk over the chunks, which has no such steps. Use {op}"
        )

    return __getattr__
