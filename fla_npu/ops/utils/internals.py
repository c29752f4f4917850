"""What the modules say that exist in FLA for parts of its kernels alone."""

from collections.abc import Callable
from typing import Any, NoReturn


def without_counterpart(module: str, *names: str, instead: str) -> Callable[[str], Any]:
    """A `__getattr__` for `module`: one of `names`, which it has in FLA, raises an ImportError with the reason.

    An ImportError and not an AttributeError, because of the latter `from module import name` drops the message.

    Args:
        instead: the public op, or ops, that do what these functions are steps of.
    """

    def __getattr__(name: str) -> NoReturn:
        if name in names:
            raise ImportError(
                f"{name} is a step between FLA's kernels; here an op is one walk over the chunks, without the "
                f"intermediates it takes or returns. Use {instead}",
                name=module,
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
