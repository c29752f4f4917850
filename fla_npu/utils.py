"""Helpers that code written for `fla.utils` imports: comparisons for tests, device names, decorators.

Devices are looked at when a name such as `device` or `IS_NPU` is first read, never on import.
"""

import functools
import inspect
import logging
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint as torch_checkpoint

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


# --- comparisons --------------------------------------------------------------------------------------------------


def get_abs_err(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest absolute difference; 0 for empty tensors."""
    return (x.detach() - y.detach()).abs().max().item() if x.numel() else 0.0


def get_err_ratio(x: torch.Tensor, y: torch.Tensor) -> float:
    """Root mean square of the difference over that of the reference `x`; 0 for empty tensors."""
    if not x.numel():
        return 0.0
    difference = (x.detach() - y.detach()).square().mean().sqrt().item()
    return difference / (x.detach().square().mean().sqrt().item() + 1e-8)


def assert_close(
    prefix: str, ref: torch.Tensor, tri: torch.Tensor, ratio: float, warning: bool = False, err_atol: float = 1e-6
) -> None:
    """Assert that `tri` matches `ref`: no element off by more than `err_atol`, or `get_err_ratio` below `ratio`.

    `warning=True` turns a failure by the ratio into a warning. Unlike in FLA, no environment variable does so.

    Raises:
        AssertionError: if they differ in shape or by too much, or one has a NaN and they differ.
    """
    assert ref.shape == tri.shape, f"{prefix}: shapes differ, {list(ref.shape)} and {list(tri.shape)}"
    difference, error = get_abs_err(ref, tri), get_err_ratio(ref, tri)
    message = f"{prefix:>16} diff: {difference:.6f} ratio: {error:.6f}"
    logger.info(message)
    if difference <= err_atol:
        return
    for name, x in (("ref", ref), ("tri", tri)):
        assert not torch.isnan(x).any(), f"{prefix}: NaN detected in {name}"
    if warning and not error < ratio:
        warnings.warn(message, stacklevel=2)
        return
    assert error < ratio, message


# --- devices ------------------------------------------------------------------------------------------------------


@functools.cache
def _platform() -> str:
    """The accelerator in Triton's words: `npu`, `cuda`, `hip`, `xpu`, or `cpu` for none."""
    if hasattr(torch, "npu") and torch.npu.is_available():
        return "npu"
    if torch.cuda.is_available():
        return "hip" if torch.version.hip else "cuda"
    return "xpu" if torch.xpu.is_available() else "cpu"


def _torch_device() -> str:
    """The same in PyTorch's words."""
    return {"hip": "cuda"}.get(_platform(), _platform())


_LAZY: dict[str, Callable[[], Any]] = {
    "device": _torch_device,
    "device_name": _torch_device,
    "device_platform": _platform,
    "device_torch_lib": lambda: getattr(torch, _torch_device()),
    "IS_NPU": lambda: _platform() == "npu",
    "IS_NVIDIA": lambda: _platform() == "cuda",
    "IS_AMD": lambda: _platform() == "hip",
    "IS_INTEL": lambda: _platform() == "xpu",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return _LAZY[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- decorators ---------------------------------------------------------------------------------------------------


def tensor_cache(fn: F) -> F:
    """Remember the last few results of a function of tensors, so that the layers of a model share one device sync.

    A result counts while every tensor argument is the same object at the same version and every other argument is
    equal. FLA goes by identity alone and so misses tensors that were changed in place; here only writes through `.data`
    or foreign memory go unnoticed. Inference tensors have no version: calls with them are not remembered.
    Arguments are held weakly, results are shared between callers.
    """
    entries: deque[tuple[tuple[Any, ...], dict[str, Any], Any]] = deque(maxlen=8)
    lock = threading.Lock()

    def freeze(x: Any) -> tuple[Any, int | None]:
        return (weakref.ref(x), x._version) if isinstance(x, torch.Tensor) else (x, None)

    def matches(frozen: tuple[Any, int | None], x: Any) -> bool:
        kept, version = frozen
        if version is None or not isinstance(x, torch.Tensor):
            return version is None and not isinstance(x, torch.Tensor) and kept == x
        return kept() is x and version == x._version

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and x.is_inference() for x in (*args, *kwargs.values())):
            return fn(*args, **kwargs)
        with lock:
            remembered = tuple(entries)
        for kept_args, kept_kwargs, result in remembered:
            if (
                len(args) == len(kept_args)
                and kwargs.keys() == kept_kwargs.keys()
                and all(map(matches, kept_args, args))
                and all(matches(kept_kwargs[name], x) for name, x in kwargs.items())
            ):
                return result
        kept_args, kept_kwargs = tuple(map(freeze, args)), {name: freeze(x) for name, x in kwargs.items()}
        result = fn(*args, **kwargs)
        with lock:
            entries.append((kept_args, kept_kwargs, result))
        return result

    return wrapper  # type: ignore[return-value]


def input_guard(fn: F | None = None, *, no_guard_contiguous: bool | Collection[str] = False) -> Any:
    """Make every tensor argument contiguous before the call, except those named (or all) in `no_guard_contiguous`.

    Usable as `@input_guard` and as `@input_guard(no_guard_contiguous=[...])`.
    """
    if fn is None:
        return functools.partial(input_guard, no_guard_contiguous=no_guard_contiguous)
    names = list(inspect.signature(fn).parameters)
    spared = no_guard_contiguous if isinstance(no_guard_contiguous, Collection) else ()

    def guard(name: str | None, x: Any) -> Any:
        if no_guard_contiguous is True or name in spared or not isinstance(x, torch.Tensor):
            return x
        return x.contiguous()

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        guarded = [guard(names[i] if i < len(names) else None, x) for i, x in enumerate(args)]
        return fn(*guarded, **{name: guard(name, x) for name, x in kwargs.items()})

    return wrapper


def contiguous(fn: F) -> F:
    """`input_guard` under its older name."""
    return input_guard(fn)


def autocast_custom_fwd(fn: F) -> F:
    """`torch.amp.custom_fwd` for the device at hand."""
    return torch.amp.custom_fwd(fn, device_type=_torch_device())


def autocast_custom_bwd(fn: F) -> F:
    """`torch.amp.custom_bwd` for the device at hand."""
    return torch.amp.custom_bwd(fn, device_type=_torch_device())


def checkpoint(fn: F) -> F:
    """Recompute the function in the backward pass instead of keeping its intermediates."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)

    return wrapper  # type: ignore[return-value]


def deprecate_kwarg(
    old_name: str,
    version: str,
    new_name: str | None = None,
    raise_if_both_names: bool = False,
    additional_message: str | None = None,
) -> Callable[[F], F]:
    """Warn (FutureWarning) about a keyword that goes away in `version`, and pass its value on as `new_name` if given.

    With both names present the new one counts, or ValueError is raised with `raise_if_both_names`.
    """

    def decorator(fn: F) -> F:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if old_name in kwargs:
                message = f"`{old_name}` of `{fn.__name__}` is deprecated and goes away in version {version}"
                if new_name is not None:
                    message += f": use `{new_name}`"
                    value = kwargs.pop(old_name)
                    if new_name in kwargs and raise_if_both_names:
                        raise ValueError(f"pass `{new_name}` or its deprecated name `{old_name}`, not both")
                    kwargs.setdefault(new_name, value)
                warnings.warn(
                    message if additional_message is None else f"{message}. {additional_message}",
                    FutureWarning,
                    stacklevel=2,
                )
            return fn(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorator
