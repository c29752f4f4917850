"""The bridge to the Triton kernels: which devices run them, which calls they take, and from a call to its launches.

The only place that decides whether a device runs kernels (those of `fla_npu.modules` ask here too). Needs no triton:
what does is imported when the first call runs.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fla_npu import settings
from fla_npu.errors import how_to_install
from fla_npu.ops.autograd import Result, gradients_wanted, with_gradients
from fla_npu.ops.checks import StatePool
from fla_npu.ops.problem import Bounds, Problem, Tensors
from fla_npu.planner.chips import chip as find_chip
from fla_npu.planner.kernels import KERNELS, WIDEST_HEAD, configuration
from fla_npu.planner.kernels import refusal as chunk_refusal

INTERPRETED_CHIP = "910B3"
"""Whose configurations run where there is no NPU, in Triton's interpreter."""

NO_TRITON = f"triton-ascend is not installed: {how_to_install('triton')} (Python below 3.12)"

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

_precision: ContextVar[str | None] = ContextVar("fla_npu_precision", default=None)


# --- what is asked for --------------------------------------------------------------------------------------------


@contextmanager
def use_precision(name: str) -> Iterator[None]:
    """Within the `with` block, let the chunk kernels compute so: `exact`, or `fast` with operands of 16 bits.

    It matters to kernels and 16-bit inputs only. Gradients come from the portable backward pass, in float32 either way.

    Raises:
        ValueError: it is neither.
    """
    token = _precision.set(settings.checked_precision("precision", name))
    try:
        yield
    finally:
        _precision.reset(token)


def precision() -> str:
    """What `use_precision`, or else `FLA_NPU_PRECISION`, asks for."""
    return _precision.get() or settings.precision()


# --- which devices ------------------------------------------------------------------------------------------------


class Device(NamedTuple):
    """A device, which need not exist here."""

    type: str
    number: int = 0
    chip: str | None = None
    """Of an NPU: its chip by name, instead of what the device reports."""


def device_refusal(device: Device, *, asked: bool = False) -> str | None:
    """Why no kernels run on a device, or None. `asked`: somebody wants kernels whatever else there is."""
    if device.type == "npu":
        return _npu_refusal(located(device).chip)
    if device.type != "cpu":
        return f"there are no kernels for {device.type}"
    if not asked:
        return "on a CPU the portable path is the fast path"
    if not settings.interprets_triton():
        return "on a CPU kernels run in Triton's interpreter only: set TRITON_INTERPRET=1 before Python starts"
    return None if find_spec("triton") else NO_TRITON


def op_refusal(op: str, device: Device, *, asked: bool = False) -> str | None:
    """`device_refusal`, and why the kernels of an op do not fit on a chip."""
    refusal = device_refusal(device, asked=asked)
    chip = located(device).chip
    if refusal is None and op in KERNELS and chip is not None:
        return chunk_refusal(KERNELS[op], find_chip(chip))
    return refusal


def located(device: Device) -> Device:
    """The device with the chip that it reports. What is decided for it may be kept: before torch_npu is imported an NPU
    reports none, and what was decided then is not asked for again."""
    if device.type != "npu" or device.chip is not None or not hasattr(torch, "npu"):
        return device
    return device._replace(chip=_reported(device.number))


@lru_cache(maxsize=16)
def _reported(number: int) -> str | None:
    return _device_name(number)


@lru_cache(maxsize=64)
def _npu_refusal(name: str | None) -> str | None:
    if name is not None:
        try:
            known = find_chip(name)
        except ValueError:
            return f"nothing is known of the chip {name!r}"
        if known.no_triton_reason is not None:
            return known.no_triton_reason
    return _triton_ascend_refusal()


def _device_name(number: int) -> str | None:
    """Name of an NPU of this machine; None if it has none."""
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return None
    name: str = npu.get_device_name(number)
    return name


def _triton_ascend_refusal() -> str | None:
    """Why there is no triton-ascend, or None. It is not imported: that takes a second."""
    spec = find_spec("triton")
    if spec is None:
        return NO_TRITON
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if not any((place / "backends" / "ascend").is_dir() for place in places):
        return "the installed triton is not triton-ascend: uninstall triton, then install triton-ascend (again)"
    # Both packages put their files into one folder; which were there last, or are still there, is chance.
    both = all(any(metadata.distributions(name=name)) for name in ("triton", "triton-ascend"))
    if both or not any((place / "__init__.py").is_file() for place in places):
        return "triton and triton-ascend share one folder: uninstall both, then install triton-ascend again"
    return None


@lru_cache(maxsize=16)
def _chip(device: torch.device) -> str:
    name = _device_name(device.index or 0) if device.type == "npu" else None
    return INTERPRETED_CHIP if name is None else find_chip(name).name


# --- which calls --------------------------------------------------------------------------------------------------


def call_refusal(op: str, problem: Problem) -> str | None:
    """Why the kernels do not take a call, or None."""
    tensors, options, _ = problem
    K, V = tensors.q.shape[3], tensors.v.shape[3]
    if any(x is not None and type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for x in tensors):
        return "the kernels read memory, which tensors that stand for others (fake, distributed) need not have"
    if any(x is not None and x.dtype == torch.float64 for x in tensors):
        return "the kernels do not compute in float64"
    if K > WIDEST_HEAD:
        return f"the kernels take key dimensions up to {WIDEST_HEAD}, not {K}"
    if not _by_chunks(op):
        return None
    if V > WIDEST_HEAD:
        return f"the chunk kernels take value dimensions up to {WIDEST_HEAD}, not {V}"
    if options.decay == "none":
        return "the chunk kernels need a decay"
    if options.return_intermediate_states:
        return "the chunk kernels keep no intermediate states"
    return None


def _by_chunks(op: str) -> bool:
    return op.startswith("chunk")


# --- running them -------------------------------------------------------------------------------------------------


def run(op: str, problem: Problem) -> Result:
    """The `triton` implementation: forward by kernels, backward by the portable pass.

    The kernels have a chunk size of their own: `Options.chunk_size` changes rounding only, as does theirs.
    """
    if not _by_chunks(op):
        return _tokens(problem)
    forward = partial(_chunks, op)
    return with_gradients(forward, problem) if gradients_wanted(problem.tensors) else forward(problem)


def _plain(problem: Problem) -> Problem:
    """The call with tensors that are in memory what they are: kernels see no lazy negation."""
    plain = [None if x is None else x.resolve_neg() for x in problem.tensors]
    return problem._replace(tensors=Tensors(*plain))  # type: ignore[arg-type]


def _chunks(op: str, problem: Problem) -> Result:
    from fla_npu.ops.common.segments import launch_balanced

    tensors, options, bounds = _plain(problem)
    device, dtype = tensors.v.device, tensors.v.dtype
    fast = precision() == "fast" and dtype != torch.float32
    B, T, HV, V = tensors.v.shape
    N = B if bounds is None else len(bounds) - 1
    config = configuration(
        op,
        _chip(device),
        K=tensors.q.shape[3],
        V=V,
        dtype=_DTYPES[dtype],
        fast=fast,
        heads=HV,
        sequences=N,
        tokens=B * T,
        bounded=options.decay == "scalar" or options.gate == "bounded",
    )
    lengths = problem.lengths if isinstance(bounds, Bounds) and bounds.known else None
    with _current(device):
        o, final = launch_balanced(tensors, options, config, cu_seqlens=_on(device, bounds), lengths=lengths, fast=fast)
    return o, final, None


def _tokens(problem: Problem) -> Result:
    from fla_npu.ops.common.decode_kernel import launch_recurrent

    tensors, options, bounds = _plain(problem)
    with _current(tensors.v.device):
        return (*launch_recurrent(tensors, options, _on(tensors.v.device, bounds)), None)


def update_states(
    problem: Problem, pool: StatePool | None, *, inplace: bool, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call of `fused_recurrent_kda_fwd`; arguments and results as those of `pool.recurrent_in_place`."""
    from fla_npu.ops.common.decode_kernel import launch_recurrent

    states = problem.tensors.initial_state
    if inplace and states is not None:
        shared = any(step == 0 and size > 1 for size, step in zip(states.shape, states.stride(), strict=True))
        if shared or states.is_neg():
            raise ValueError(
                "initial_state must have a place in memory for every element to be updated in place, "
                f"got a tensor of shape {tuple(states.shape)} with strides {states.stride()}"
                + (" and a lazy negation" if states.is_neg() else "")
            )
    tensors, options, bounds = _plain(problem)
    device = tensors.v.device
    direct = out is not None and _takes_results(out, problem)
    slots = (None, None) if pool is None else (pool.indices, pool.accepted)
    indices, accepted = (None if x is None else x.to(device, non_blocking=True) for x in slots)
    with _current(device):
        o, states = launch_recurrent(
            tensors,
            options,
            _on(device, bounds),
            inplace=inplace,
            indices=indices,
            accepted=accepted,
            out=out if direct else None,
        )
    # Autograd sees no writes of kernels: it has to be told of those to the caller's tensors.
    torch.autograd.graph.increment_version([x for x in (states if inplace else None, o) if x is not None])
    return (o if out is None or direct else out.copy_(o)), states


def _takes_results(out: torch.Tensor, problem: Problem) -> bool:
    """Whether a kernel can write o to `out`: what it still has to read must lie elsewhere."""
    v = problem.tensors.v
    place = out.untyped_storage().data_ptr()
    return (
        out.is_contiguous()
        and out.dtype == v.dtype
        and out.device == v.device
        and all(x is None or x.untyped_storage().data_ptr() != place for x in problem.tensors)
    )


def _on(device: torch.device, bounds: Any) -> torch.Tensor | None:
    """The bounds of a checked call as kernels read them. A call captured in a graph repeats the conversion."""
    if bounds is None:
        return None
    assert isinstance(bounds, Bounds), "what checks.py makes"
    return bounds.tensor.to(device, torch.int64, non_blocking=True).contiguous()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, wherever the tensors are."""
    npu: Any = getattr(torch, "npu", None)
    return npu.device(device.index) if device.type == "npu" else nullcontext()
