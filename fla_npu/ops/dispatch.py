"""Which implementation runs a call, and why: one table, one rule.

An explicit choice (`use_implementation`, or the environment variable `FLA_NPU_IMPL`) is honoured or refused with a
reason; otherwise the first implementation of the table that can run the call is taken. `use_precision` is for the
kernels alone.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from fla_npu import settings
from fla_npu.errors import ImplementationError
from fla_npu.ops import kernels
from fla_npu.ops.autograd import Result, eager, forward_only, gradients_wanted, without_autocast
from fla_npu.ops.checks import StatePool
from fla_npu.ops.common.reference import reference_forward
from fla_npu.ops.kernels import Device, located
from fla_npu.ops.kernels import use_precision as use_precision
from fla_npu.ops.problem import Problem

logger = logging.getLogger(__name__)

OPS = ("chunk_gdn", "fused_recurrent_gdn", "chunk_kda", "fused_recurrent_kda", "fused_recurrent_kda_fwd")
"""The ops that there are kernels for, by the short names that `explain` takes."""

WITHOUT_KERNELS = (
    *("chunk_gdn2", "fused_recurrent_gdn2", "chunk_delta_product"),
    *("chunk_delta_rule", "fused_recurrent_delta_rule"),
    *("chunk_simple_gla", "fused_recurrent_simple_gla", "chunk_gla", "fused_recurrent_gla"),
)
"""Those that run on the portable path everywhere."""

NAMES = {
    "chunk_gated_delta_rule": "chunk_gdn",
    "fused_recurrent_gated_delta_rule": "fused_recurrent_gdn",
    "recurrent_gated_delta_rule": "fused_recurrent_gdn",
    "chunk_gated_delta_product": "chunk_delta_product",
    **dict.fromkeys(("fused_chunk_simple_gla", "parallel_simple_gla", "chunk_retention"), "chunk_simple_gla"),
    **dict.fromkeys(("fused_chunk_retention", "parallel_retention"), "chunk_simple_gla"),
    "fused_recurrent_retention": "fused_recurrent_simple_gla",
}
"""The ops behind public functions of another name."""


class Choice(NamedTuple):
    """What runs an op on a device."""

    implementation: str
    reason: str


@dataclass(frozen=True)
class Implementation:
    """One way to run the ops."""

    name: str
    what: str
    run: Callable[[str, Problem], Result]
    refuses_device: Callable[[str, Device, bool], str | None]
    """Why nothing runs on a device, or None. The flag: it was asked for by name."""
    refuses_call: Callable[[str, Problem], str | None]
    """Why a call does not run, or None."""
    refuses_pool: Callable[[str, Problem], str | None]
    """The same for a call over a pool of states."""
    update: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None = None
    """Runs `fused_recurrent_kda_fwd` with states written to their place, see `pool.recurrent_in_place`; None: that
    function does, by `run` and by what it has for pools."""


def _no_kernels(op: str, device: Device, asked: bool) -> str | None:
    if op in WITHOUT_KERNELS:
        return "there are no kernels for this op yet"
    return kernels.op_refusal(op, device, asked=asked)


def no_chunk_form(problem: Problem, *, backward: bool) -> str | None:
    """Why the chunked dataflow cannot run a call, or None. `backward`: with its gradients."""
    tensors = problem.tensors
    if tensors.q.shape[1] == 0:
        return None
    if tensors.gv is not None:
        return "a decay per value channel (gv) has no chunk form"
    if tensors.gk is not None:
        return "a decay per head and one per key channel at once have no chunk form here"
    if tensors.beta is not None and tensors.beta.ndim == 4 and (tensors.v.shape[1] > 1 or backward):
        return "a beta per value channel has no chunk form"
    return None


IMPLEMENTATIONS = (
    Implementation(
        name="triton",
        what="the persistent Triton kernels",
        run=kernels.run,
        refuses_device=_no_kernels,
        refuses_call=kernels.call_refusal,
        refuses_pool=kernels.call_refusal,
        update=kernels.update_states,
    ),
    Implementation(
        name="eager",
        what="the chunked dataflow in PyTorch",
        run=lambda op, problem: eager(problem),
        refuses_device=lambda op, device, asked: None,
        refuses_call=lambda op, problem: no_chunk_form(problem, backward=gradients_wanted(problem.tensors)),
        refuses_pool=lambda op, problem: None,
    ),
    Implementation(
        name="reference",
        what="the recurrence, token by token",
        run=lambda op, problem: reference_forward(problem),
        refuses_device=lambda op, device, asked: None,
        refuses_call=lambda op, problem: (
            "it keeps no intermediate states" if problem.options.return_intermediate_states else None
        ),
        refuses_pool=lambda op, problem: "it cannot update states in a pool",
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


def explain(op: str, device: str | torch.device = "cpu", *, chip: str | None = None) -> Choice:
    """What would run an op on a device here and now, and why.

    Args:
        op: one of `OPS` or `WITHOUT_KERNELS`, or the name of a public function.
        device: a device or its type; it need not exist on this machine.
        chip: of an NPU: a name such as `910B3`, instead of what the device reports. An NPU that does not exist is one
            that kernels are meant for by default.
    """
    op = NAMES.get(op, op)
    known = OPS + WITHOUT_KERNELS
    if op not in known:
        raise ValueError(f"op must be one of {', '.join(known)}, got {op!r}")
    kind, _, index = str(device).partition(":")
    if not kind or not (index or "0").isdigit():
        raise ValueError(f"device must be a device or its type, such as npu or npu:0, got {str(device)!r}")
    return _choose(op, located(Device(kind, int(index or 0), chip)), requested())


def run(op: str, problem: Problem, *, differentiable: bool) -> Result:
    """Run a validated call by the implementation that is chosen for it."""
    implementation = select(op, problem)
    with without_autocast(problem.tensors.q.device.type):
        if differentiable:
            return implementation.run(op, problem)
        return forward_only(partial(implementation.run, op), problem)


def select(op: str, problem: Problem, pool: StatePool | None = None) -> Implementation:
    """The implementation that runs a call.

    Raises:
        ImplementationError: one was asked for, and cannot.
    """
    asked = requested()
    where = problem.tensors.q.device
    device = located(Device(where.type, where.index or 0))
    implementation = _BY_NAME[_choose(op, device, asked).implementation]

    def refusal(one: Implementation) -> str | None:
        return one.refuses_call(op, problem) if pool is None else one.refuses_pool(op, problem)

    reason = refusal(implementation)
    if reason is None:
        return implementation
    if asked != "auto":
        raise ImplementationError(f"implementation {asked!r} cannot run this call of {op}: {reason}")
    return next(
        one for one in IMPLEMENTATIONS if one.refuses_device(op, device, False) is None and refusal(one) is None
    )


def check_request() -> None:
    """Raise ImplementationError unless what is asked for exists."""
    _check_name(requested())


def requested() -> str:
    """The implementation that is asked for by name, or `auto`."""
    return _override.get() or settings.implementation()


@lru_cache(maxsize=256)
def _choose(op: str, device: Device, requested: str) -> Choice:
    """The rule. Cached, so that a decision is also logged once."""
    _check_name(requested)
    if requested != "auto":
        refusal = _BY_NAME[requested].refuses_device(op, device, True)
        if refusal is not None:
            raise ImplementationError(f"implementation {requested!r} cannot run on {device.type}: {refusal}")
        choice = Choice(requested, "asked for by use_implementation or FLA_NPU_IMPL")
    else:
        no_kernels = _no_kernels(op, device, False)
        chosen = next(x for x in IMPLEMENTATIONS if x.refuses_device(op, device, False) is None)
        where = "run on NPUs with triton-ascend" if no_kernels is None else f"runs on any device; {no_kernels}"
        choice = Choice(chosen.name, f"{chosen.what} {where}")
    logger.info("%s on %s: %s (%s)", op, device.type, *choice)
    return choice


def _check_name(name: str) -> None:
    if name != "auto" and name not in _BY_NAME:
        raise ImplementationError(f"no implementation {name!r}: choose from auto, {', '.join(_BY_NAME)}")
