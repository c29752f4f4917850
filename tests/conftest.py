"""Settings of the whole suite: reproducible Hypothesis, one thread, a clean environment, and loud unwritten memory."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("local", deadline=None, max_examples=40)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure() -> None:
    # More threads than cores in use (pytest-xdist) make small products many times slower.
    torch.set_num_threads(1)
    for name in [name for name in os.environ if name.startswith("FLA_NPU_")]:
        del os.environ[name]


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        if x.is_floating_point():
            with torch.no_grad():
                x.fill_(float("nan"))
        return x

    return wrapper


@pytest.fixture(scope="session", autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fresh memory often holds zeros or the right answer of an earlier test: a result nobody wrote would pass."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield
