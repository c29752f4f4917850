"""Helpers that code written for `fla.utils` imports: comparisons for tests, device names, decorators.

Devices are looked at when a name such as `device` or `IS_NPU` is first read, never on import.
"""

import functools
import inspect
import logging
import platform
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion
from torch.utils import checkpoint as torch_checkpoint

from fla_npu import settings

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

FLA_VERSION = "0.6.0"
"""The version of FLA whose interface this package has."""


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


def get_available_device() -> str:
    """The accelerator in Triton's words: `npu`, `cuda`, `hip`, `xpu`, or `cpu` for none."""
    return _platform()


def map_triton_backend_to_torch_device() -> str:
    """The accelerator in PyTorch's words: `npu`, `cuda`, `xpu`, or `cpu` for none."""
    return _torch_device()


@functools.cache
def get_device_capability(device_index: int = 0) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device_index)


@functools.cache
def get_device_arch() -> str:
    """Architecture of the first device, such as `90`, `gfx942` or `Ascend910B3`; empty where there is none to tell."""
    if _platform() == "cuda":
        return "".join(map(str, get_device_capability()))
    if _platform() == "hip":
        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    return getattr(torch, _torch_device()).get_device_name(0) if _platform() == "npu" else ""


@functools.cache
def get_multiprocessor_count(tensor_idx: int = 0, *, use_aicore: bool = False) -> int:
    """Processors of a device: streaming multiprocessors, vector cores of an NPU or with `use_aicore` its AI cores; 1
    where they cannot be told."""
    if _torch_device() == "cuda":
        return torch.cuda.get_device_properties(tensor_idx).multi_processor_count
    if _platform() == "npu":
        try:  # the driver is reached through triton-ascend
            from fla_npu.ops.common.ascend import core_count, vector_core_count

            return (core_count if use_aicore else vector_core_count)(torch.device("npu", tensor_idx))
        except (ImportError, RuntimeError):
            logger.debug("the number of cores is unknown", exc_info=True)
    return 1


@functools.cache
def get_device_smem_optin(device_index: int = 0) -> int:
    """Bytes of shared memory that a block may have on a GPU."""
    properties = torch.cuda.get_device_properties(device_index)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def get_all_max_shared_mem() -> list[int]:
    """The same for every GPU; `[-1]` where there is none, NPUs included."""
    if _torch_device() != "cuda":
        return [-1]
    return [get_device_smem_optin(i) for i in range(torch.cuda.device_count())]


class Backend(Enum):
    """Bytes of shared memory that FLA tells GPUs apart by."""

    ADA = 101376
    AMPERE = 166912
    HOPPER = 232448
    DEFAULT = 102400

    @classmethod
    def get_shared_memory(cls, arch: str) -> int:
        """Of a generation, or of the default for a name that is none."""
        return cls.__members__.get(arch.upper(), cls.DEFAULT).value


@functools.cache
def check_shared_mem(arch: str = "none", tensor_idx: int = 0) -> bool:
    """Whether a GPU has as much shared memory as those of a generation; False on any other device."""
    sizes = get_all_max_shared_mem()
    return tensor_idx < len(sizes) and sizes[tensor_idx] >= Backend.get_shared_memory(arch)


def custom_device_ctx(index: int | None) -> AbstractContextManager[Any]:
    """Makes a device the current one; nothing for None, and where there is no accelerator."""
    if index is None or _torch_device() == "cpu":
        return nullcontext()
    return getattr(torch, _torch_device()).device(index)


def _is_cuda(holds: Callable[[tuple[int, int]], bool]) -> Callable[[], bool]:
    return lambda: _platform() == "cuda" and holds(get_device_capability())


def _has_gather() -> bool:
    if find_spec_cached("triton") is None:
        return False
    import triton.language

    return hasattr(triton.language, "gather")


_LAZY: dict[str, Callable[[], Any]] = {
    "device": _torch_device,
    "device_name": _torch_device,
    "device_platform": _platform,
    "device_torch_lib": lambda: getattr(torch, _torch_device()),
    "FLA_CI_ENV": lambda: settings.fla_switch("FLA_CI_ENV", False),
    "IS_NPU": lambda: _platform() == "npu",
    "IS_AMD": lambda: _platform() == "hip",
    "IS_ARM": lambda: platform.machine().lower() in ("aarch64", "arm64"),
    "IS_INTEL": lambda: _platform() == "xpu",
    "IS_INTEL_ALCHEMIST": lambda: _platform() == "xpu" and "Intel(R) Arc(TM) A" in torch.xpu.get_device_name(0),
    "IS_NVIDIA": lambda: _platform() == "cuda",
    "IS_NVIDIA_HOPPER": _is_cuda(lambda capability: capability[0] == 9),
    "IS_NVIDIA_BLACKWELL": _is_cuda(lambda capability: capability[0] in (10, 12)),
    "IS_NVIDIA_SM100": _is_cuda(lambda capability: capability[0] == 10),
    "IS_NVIDIA_SM120": _is_cuda(lambda capability: capability == (12, 0)),
    "IS_TF32_SUPPORTED": _is_cuda(lambda capability: capability[0] >= 8),
    "IS_GATHER_SUPPORTED": _has_gather,
    # Tensor descriptors are a matter of FLA's kernels for GPUs, which are not here.
    "IS_AMD_TMA_ARCH": lambda: False,
    "IS_TMA_SUPPORTED": lambda: False,
}
_LAZY |= {name.lower(): value for name, value in _LAZY.items() if name.startswith("IS_")}
"""FLA has these in both spellings."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return _LAZY[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- what is installed --------------------------------------------------------------------------------------------


@functools.cache
def find_spec_cached(name: str) -> ModuleSpec | None:
    """Where a module would be imported from, or None; also for `a.b` where there is no `a`."""
    try:
        return find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def check_pytorch_version(version_s: str = "2.4") -> bool:
    """Whether PyTorch is of this version or later."""
    return TorchVersion(torch.__version__) >= version_s


@functools.cache
def check_transformers_version(version_s: str) -> bool:
    """Whether transformers is installed in this version or later."""
    try:
        return TorchVersion(metadata.version("transformers")) >= version_s
    except metadata.PackageNotFoundError:
        return False


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
    """Make every tensor argument contiguous before the call, except those named (or all) in `no_guard_contiguous`, and
    the device of the first one the current device during it.

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
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        first = next(tensors, None)
        with custom_device_ctx(None if first is None else first.device.index):
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
    warn_if_greater_or_equal_version: bool = False,
    raise_if_greater_or_equal_version: bool = False,
    raise_if_both_names: bool = False,
    additional_message: str | None = None,
) -> Callable[[F], F]:
    """Warn (FutureWarning) about a keyword that goes away in `version`, and pass its value on as `new_name` if given.

    With both names present the new one counts, with a warning, or with `raise_if_both_names` an error.

    From `version` of FLA on, of which `FLA_VERSION` counts as the current one, the keyword is accepted in silence; or
    still with a warning, or not at all, with one of the next two arguments.

    Raises:
        ValueError: in a call, as above.
    """
    is_gone = TorchVersion(FLA_VERSION) >= version

    def decorator(fn: F) -> F:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if old_name not in kwargs:
                return fn(*args, **kwargs)
            message = f"`{old_name}` of `{fn.__name__}` is deprecated and goes away in version {version}"
            has_both = new_name is not None and new_name in kwargs
            if new_name is not None:
                message += f": use `{new_name}`"
                value = kwargs.pop(old_name)
                kwargs.setdefault(new_name, value)
            if additional_message is not None:
                message += f". {additional_message}"
            if has_both and raise_if_both_names:
                raise ValueError(f"pass `{new_name}` or its deprecated name `{old_name}`, not both")
            if is_gone and raise_if_greater_or_equal_version:
                raise ValueError(message)
            if has_both or not is_gone or warn_if_greater_or_equal_version:
                warnings.warn(message, FutureWarning, stacklevel=2)
            return fn(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorator
