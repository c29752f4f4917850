"""Which implementation runs a call, and why: one table, one rule.

An explicit choice (`use_implementation`, or the environment variable `FLA_NPU_IMPL`) is honoured or refused with a
reason; otherwise the first implementation of the table that can run the call is taken.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from fla_npu import settings
from fla_npu.errors import ImplementationError
from fla_npu.ops.autograd import Result, eager, forward_only, without_autocast
from fla_npu.ops.common.reference import reference_forward
from fla_npu.ops.problem import Problem

logger = logging.getLogger(__name__)

OPS = ("chunk_gdn", "fused_recurrent_gdn", "chunk_kda", "fused_recurrent_kda", "fused_recurrent_kda_fwd")
"""The ops by the short names that `explain` takes."""


class Choice(NamedTuple):
    """What runs an op on a device."""

    implementation: str
    reason: str


@dataclass(frozen=True)
class Implementation:
    """One way to run the ops."""

    name: str
    what: str
    run: Callable[[Problem], Result]
    refuses_device: Callable[[str, str], str | None]
    """Why an op does not run on a device type, or None."""
    refuses_call: Callable[[Problem], str | None]
    """Why a call does not run, or None."""


def _no_chunk_form(problem: Problem) -> str | None:
    tensors = problem.tensors
    if tensors.gv is not None:
        return "a decay per value channel (gv) has no chunk form"
    if tensors.gk is not None:
        return "a decay per head and one per key channel at once have no chunk form here"
    if tensors.beta.ndim == 4 and tensors.v.shape[1] > 1:
        return "a beta per value channel has no chunk form"
    return None


IMPLEMENTATIONS = (
    Implementation(
        name="eager",
        what="the chunked dataflow in PyTorch",
        run=eager,
        refuses_device=lambda op, device: None,
        refuses_call=_no_chunk_form,
    ),
    Implementation(
        name="reference",
        what="the recurrence, token by token",
        run=reference_forward,
        refuses_device=lambda op, device: None,
        refuses_call=lambda problem: (
            "it keeps no intermediate states" if problem.options.return_intermediate_states else None
        ),
    ),
)

_BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
_override: ContextVar[str | None] = ContextVar("fla_npu_implementation", default=None)


@contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Run every op within the `with` block by the implementation of this name (`auto` for the usual rule).

    Raises:
        ImplementationError: there is none of this name; or, from an op, it cannot run the call.
    """
    _check_name(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def explain(op: str, device: str | torch.device = "cpu") -> Choice:
    """What would run an op on a device here and now, and why.

    Args:
        op: one of `OPS`.
        device: a device or its type; it need not exist on this machine.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    device_type = device.type if isinstance(device, torch.device) else device.split(":")[0]
    return _choose(op, device_type, _requested())


def run(op: str, problem: Problem, *, differentiable: bool) -> Result:
    """Run a validated call by the implementation that is chosen for it."""
    requested = _requested()
    choice = _choose(op, problem.tensors.q.device.type, requested)
    implementation = _BY_NAME[choice.implementation]
    refusal = implementation.refuses_call(problem)
    if refusal is not None:
        if requested != "auto":
            raise ImplementationError(f"implementation {requested!r} cannot run this call of {op}: {refusal}")
        implementation = next(other for other in IMPLEMENTATIONS if other.refuses_call(problem) is None)
    with without_autocast(problem.tensors.q.device.type):
        return implementation.run(problem) if differentiable else forward_only(implementation.run, problem)


def _requested() -> str:
    return _override.get() or settings.implementation()


@lru_cache(maxsize=256)
def _choose(op: str, device_type: str, requested: str) -> Choice:
    """The rule. Cached, so that a decision is also logged once."""
    _check_name(requested)
    if requested != "auto":
        refusal = _BY_NAME[requested].refuses_device(op, device_type)
        if refusal is not None:
            raise ImplementationError(f"implementation {requested!r} cannot run {op} on {device_type}: {refusal}")
        choice = Choice(requested, "asked for by use_implementation or FLA_NPU_IMPL")
    else:
        chosen = next(x for x in IMPLEMENTATIONS if x.refuses_device(op, device_type) is None)
        choice = Choice(chosen.name, f"{chosen.what} runs on any device; {_why_no_kernel(device_type)}")
    logger.info("%s on %s: %s (%s)", op, device_type, *choice)
    return choice


def _why_no_kernel(device_type: str) -> str:
    if device_type == "npu":
        return "this version has no Triton kernels for NPUs yet"
    if device_type == "cpu":
        return "on a CPU it is the fast path"
    return f"there are no kernels for {device_type}"


def _check_name(name: str) -> None:
    if name != "auto" and name not in _BY_NAME:
        raise ImplementationError(f"no implementation {name!r}: choose from auto, {', '.join(_BY_NAME)}")
