"""The registry of backends that FLA's callers import: who is asked, in which order, and what switches it off."""

import logging
from typing import Any, ClassVar

import pytest
import torch

from fla_npu import backends
from fla_npu.backends import BackendRegistry, BaseBackend, dispatch, register


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "_of_operations", {})
    monkeypatch.setattr(backends, "_of_functions", {})
    for name in ("FLA_DISABLE_BACKEND_DISPATCH", "FLA_FIRST", "FLA_SWITCH"):
        monkeypatch.delenv(name, raising=False)


def backend(kind: str, **attributes: Any) -> type[BaseBackend]:
    """One whose `work` returns its type."""
    return type(kind, (BaseBackend,), {"backend_type": kind, "work": lambda self, *args, **kwargs: kind, **attributes})


def work(x: int = 0) -> str:
    """The original."""
    return "original"


def test_smallest_priority_then_first_registered():
    call = dispatch("op")(work)
    assert call() == "original" and call.__name__ == "work" and call.__doc__ == "The original."
    for kind, priority in (("late", 7), ("first", 5), ("second", 5)):
        register("op")(backend(kind, priority=priority))
    assert call() == "first"
    register("op")(backend("first", priority=9))  # one of a type replaces another
    assert call() == "second"
    register("another op")(backend("first", priority=0))
    assert call() == "second"
    assert dispatch("op")(lambda: "no method of that name")() == "no method of that name"


def test_a_verifier_refuses(caplog: pytest.LogCaptureFixture):
    class Even(BaseBackend):
        backend_type: ClassVar[str] = "even"

        def work(self, x: int) -> str:
            return "even"

        def work_verifier(self, x: int) -> tuple[bool, str | None]:
            if x > 100:
                raise RuntimeError("too large")
            return x % 2 == 0, "odd"

    call = dispatch("op")(work)
    assert register("op")(Even) is Even
    with caplog.at_level(logging.INFO, logger="fla_npu.backends"):
        assert [call(2), call(3), call(x=102), call(4), call(5)] == ["even", "original", "original", "even", "original"]
    assert caplog.messages == ["op.work -> even", "op.work -> even rejected: odd"]
    register("op", verifier=lambda x: (x == 3, None))(Even)
    assert [call(2), call(3)] == ["original", "even"]


def test_a_function_of_its_own():
    call = dispatch(work)
    other = dispatch(lambda: "other")

    @register(call, verifier=lambda x: (x > 0, "small"))
    def replacement(x: int) -> str:
        return f"replaced {x}"

    assert replacement(1) == call(1) == "replaced 1" and call(-1) == "original" and other() == "other"
    register(call, backend=backend("fast", priority=0))(lambda x: "fast")
    assert call(-1) == "fast"
    with pytest.raises(ValueError, match="replacement takes no backends: it is not decorated with dispatch"):
        register(replacement)(work)
    with pytest.raises(ValueError, match="type of the class, 'second', got 'first'"):
        register("op", backend=backend("first"))(backend("second"))


def test_the_package_it_needs():
    register("op")(backend("first", package_name="no_such_package.part"))
    register("op")(backend("second", package_name="torch.nn", priority=9))
    assert dispatch("op")(work)() == "second"
    active = backends._of_operations["op"].get_active()
    assert active is not None and active.backend_type == "second"
    assert BackendRegistry("empty").get_active() is None


@pytest.mark.parametrize(
    ("switch", "of_type", "by_default", "on"),
    [
        (None, None, True, True),
        (None, None, False, False),
        ("0", None, True, False),
        ("1", None, False, True),
        ("", None, False, False),
        ("0", "1", True, True),
        (None, "1", False, True),
        (None, "0", True, True),
    ],
)
def test_switches(switch: Any, of_type: Any, by_default: bool, on: bool, monkeypatch: pytest.MonkeyPatch):
    kind = backend("first", default_enable=by_default)
    register("op", env_var="FLA_SWITCH")(kind)
    call = dispatch("op")(work)
    # After the decoration: the environment is read with every call.
    for name, value in (("FLA_SWITCH", switch), ("FLA_FIRST", of_type)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert call() == ("first" if on else "original")
    assert kind(env_var="FLA_SWITCH").is_enabled() is on and kind.can_use()  # which has no variable of its own


def test_disabled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    register("op")(backend("first"))
    assert dispatch("op")(work) is work and dispatch(work) is work
    assert register(work)(work) is work  # no error: nothing is dispatched


def test_is_outside_of_graphs():
    torch._dynamo.reset()
    call = dispatch("op")(lambda x: x + 1)
    compiled = torch.compile(lambda x: call(2 * x), backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3]

    class Doubling(BaseBackend):
        def get_implementation(self, function_name: str) -> Any:
            return lambda x: 2 * x

    register("op")(Doubling)
    assert compiled(torch.ones(2)).tolist() == [4, 4]
