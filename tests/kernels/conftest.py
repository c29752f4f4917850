"""Tests of the kernels in the interpreter: `TRITON_INTERPRET=1`, in a process of their own, where there is triton."""

import importlib.util
import os
from collections.abc import Iterator
from types import FunctionType

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def language_is_patched_once_per_module() -> Iterator[None]:
    """The interpreter replaces Triton's language by its own, for good, at every call of a jitted function: most of the
    time of a kernel made of small functions. Once for each module of kernels is enough."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: set[str] = set()

    def once(fn: FunctionType) -> None:
        if fn.__module__ not in patched:
            patch(fn)
            patched.add(fn.__module__)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang", once)
        yield
