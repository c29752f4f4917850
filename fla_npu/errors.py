"""Exceptions of fla_npu.

Exception
├── ValueError, TypeError          bad arguments (FLA's AssertionError where FLA raises one, see `ShapeError`)
│   └── ShapeError                 also an AssertionError
└── RuntimeError
    ├── ImplementationError        a requested implementation cannot run this call
    └── MissingExtraError          an optional dependency is needed; the message names the extra
"""


class ShapeError(ValueError, AssertionError):
    """A tensor argument has the wrong shape, dtype or device, or a call breaks another rule that FLA asserts.

    FLA raises `AssertionError` for some of these and `ValueError` for others; this class is both, so that
    callers' `except` clauses written for FLA keep working.
    """


class ImplementationError(RuntimeError):
    """The implementation that was asked for does not exist or cannot run this call."""


class MissingExtraError(RuntimeError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """The command that brings an extra, for a message."""
    return f"pip install 'fla-npu[{extra}]', or '.[{extra}]' in a checkout"
