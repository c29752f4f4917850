"""FLA's registry of backends: functions that others may replace from outside, call by call.

For code that brings functions or backends of its own and imports this from `fla.backends`. The ops of this package are
not in it: `fla_npu.ops.dispatch` chooses what they run on.

    @dispatch
    def double(x):
        return 2 * x

    @register(double, verifier=lambda x: (x.is_cuda, "needs CUDA"))
    def double_on_cuda(x): ...
"""

import functools
import logging
from collections.abc import Callable
from inspect import unwrap
from typing import Any, ClassVar, TypeVar

import torch

from fla_npu import settings
from fla_npu.utils import find_spec_cached

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["BackendRegistry", "BaseBackend", "dispatch", "register"]


class BaseBackend:
    """What replaces functions: a subclass has a method of the name of each.

    A method `<function>_verifier` may refuse a call: it takes the call's arguments and returns whether they are served
    and, if not, why. One that raises refuses.
    """

    backend_type: ClassVar[str] = "base"
    """In a registry one backend of a type replaces another."""
    package_name: ClassVar[str | None] = None
    """What must be installed."""
    env_var: str | None = None
    """Switches the backend off with `0` and, if it is not on by default, on with `1`. Where it is named, the variable
    `FLA_<BACKEND_TYPE>` set to `1` switches all backends of the type on."""
    default_enable: ClassVar[bool] = True
    """Whether it is on where `env_var` is not set."""
    priority: ClassVar[int] = 5
    """The smallest is asked first; of equal ones that which was registered first."""
    implementation: Callable[..., Any] | None = None
    """Set by `register` for a function that is no method."""
    verifier: Callable[..., tuple[bool, str | None]] | None = None

    def __init__(self, *, env_var: str | None = None) -> None:
        if env_var is not None:
            self.env_var = env_var

    def get_implementation(self, function_name: str) -> Callable[..., Any] | None:
        """What replaces a function, or None."""
        return self.implementation if self.implementation is not None else getattr(self, function_name, None)

    @classmethod
    def is_available(cls) -> bool:
        """Whether the package it needs is installed."""
        return cls.package_name is None or find_spec_cached(cls.package_name) is not None

    def is_enabled(self) -> bool:
        """Whether the environment leaves it on; read with every call."""
        if self.env_var is None or settings.fla_switch(f"FLA_{self.backend_type.upper()}", False):
            return True
        return settings.fla_switch(self.env_var, self.default_enable)

    @classmethod
    def can_use(cls) -> bool:
        """Whether it is there and on."""
        return cls.is_available() and cls().is_enabled()

    def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """Whether it takes a call, and if not why."""
        verifier = self.verifier if self.verifier is not None else getattr(self, f"{function_name}_verifier", None)
        if verifier is None:
            return True, None
        try:
            return verifier(*args, **kwargs)
        except Exception as error:
            return False, str(error)


class BackendRegistry:
    """The backends of one operation or function."""

    def __init__(self, operation_name: str) -> None:
        self.operation_name = operation_name
        self._backends: dict[str, BaseBackend] = {}
        self._logged: set[str] = set()

    def register(self, backend: BaseBackend) -> None:
        """Add a backend, in place of one of the same type."""
        self._backends[backend.backend_type] = backend

    def get_active(self) -> BaseBackend | None:
        """The first that is there and on, whatever the call."""
        return next((b for b in self._sorted() if b.is_available() and b.is_enabled()), None)

    def dispatch(self, default_function: F) -> F:
        """The function, which every call first offers to the backends in order.

        With `FLA_DISABLE_BACKEND_DISPATCH=1` it is returned as it is.
        """
        if _is_disabled():
            return default_function
        name = default_function.__name__

        @functools.wraps(default_function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for backend in self._sorted():
                if not (backend.is_available() and backend.is_enabled()):
                    continue
                accepted, reason = backend.verify(name, *args, **kwargs)
                if not accepted:
                    self._log_once(f"{name} -> {backend.backend_type} rejected", reason)
                    continue
                implementation = backend.get_implementation(name)
                if implementation is not None:
                    self._log_once(f"{name} -> {backend.backend_type}")
                    return implementation(*args, **kwargs)
            return default_function(*args, **kwargs)

        # What the environment and the verifiers say must not be fixed in a graph.
        return torch.compiler.disable(wrapper)

    def _sorted(self) -> list[BaseBackend]:
        return sorted(self._backends.values(), key=lambda backend: backend.priority)

    def _log_once(self, message: str, reason: str | None = None) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.info("%s.%s%s", self.operation_name, message, "" if reason is None else f": {reason}")


_of_operations: dict[str, BackendRegistry] = {}
_of_functions: dict[Callable[..., Any], BackendRegistry] = {}


def register(
    entry_point: Callable[..., Any] | str,
    *,
    backend: type[BaseBackend] | None = None,
    verifier: Callable[..., tuple[bool, str | None]] | None = None,
    env_var: str | None = None,
) -> Callable[[F], F]:
    """A decorator that registers a backend class, or a function as the implementation of a backend.

    Args:
        entry_point: a function decorated with `dispatch`, or the name of an operation.
        backend: the class of which a function becomes the implementation; `BaseBackend` when None.
        verifier, env_var: of the backend, in place of its own.

    Raises:
        ValueError: `entry_point` is a function without `dispatch`; `backend` has another type than a class that is
            registered.
    """

    def decorator(implementation: F) -> F:
        if _is_disabled() and not isinstance(entry_point, str):
            return implementation
        if isinstance(entry_point, str):
            registry = _of_operation(entry_point)
        elif unwrap(entry_point) in _of_functions:
            registry = _of_functions[unwrap(entry_point)]
        else:
            raise ValueError(f"{entry_point.__qualname__} takes no backends: it is not decorated with dispatch")
        if isinstance(implementation, type):
            registered: BaseBackend = implementation()
            if backend is not None and backend.backend_type != registered.backend_type:
                raise ValueError(
                    f"backend must be of the type of the class, {registered.backend_type!r}, "
                    f"got {backend.backend_type!r}"
                )
        else:
            registered = (backend or BaseBackend)()
            registered.implementation = implementation
        if verifier is not None:
            registered.verifier = verifier
        if env_var is not None:
            registered.env_var = env_var
        registry.register(registered)
        return implementation

    return decorator


def dispatch(entry_point: Any) -> Any:
    """A decorator for functions that backends may replace: `@dispatch("operation")`, whose functions share a registry,
    or `@dispatch` alone, for a registry of the function's own."""
    if isinstance(entry_point, str):
        return _of_operation(entry_point).dispatch
    if _is_disabled():
        return entry_point
    registry = _of_functions[unwrap(entry_point)] = BackendRegistry(entry_point.__module__)
    return registry.dispatch(entry_point)


def _of_operation(name: str) -> BackendRegistry:
    return _of_operations.setdefault(name, BackendRegistry(name))


def _is_disabled() -> bool:
    return settings.fla_switch("FLA_DISABLE_BACKEND_DISPATCH", False)
