"""Recurrent forward passes that write states back where they came from: into the caller's tensor, or a pool's slots."""

from functools import partial

import torch

from fla_npu.dtypes import compute_dtype
from fla_npu.ops.autograd import without_autocast
from fla_npu.ops.checks import StatePool
from fla_npu.ops.common.step import one_token
from fla_npu.ops.dispatch import select
from fla_npu.ops.problem import Problem

OP = "fused_recurrent_kda_fwd"


@torch.no_grad()
def recurrent_in_place(
    problem: Problem, pool: StatePool | None, *, inplace: bool, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call of `fused_recurrent_kda_fwd`.

    Args:
        problem: the call; `initial_state` is the pool when there is one.
        pool: the slots to read and write, or None.
        inplace: write final states into `initial_state`.
        out: receives o, or None for a new tensor.

    Returns:
        `(o, states)`: the states are `initial_state` itself with `inplace`, else as `chunked_forward` gives them.
    """
    states = problem.tensors.initial_state
    implementation = select(OP, problem, pool)
    with without_autocast(problem.tensors.q.device.type):
        if implementation.update is not None:
            return implementation.update(problem, pool, inplace=inplace, out=out)
        if pool is not None:
            o, fresh = _through_pool(problem, pool, write_back=inplace)
            return _into(o, out), states if inplace else fresh
        o, final, _ = implementation.run(OP, problem)
    if inplace and states is not None and final is not None:
        final = states.copy_(final)
    return _into(o, out), final


def _into(o: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return o if out is None else out.copy_(o)


def _through_pool(problem: Problem, pool: StatePool, *, write_back: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token by token over all sequences at once, storing each state that is left behind."""
    tensors, options, cu_seqlens = problem
    states = tensors.initial_state
    assert states is not None, "checked with the pool"
    device = states.device
    length = tensors.v.shape[1]
    load, store = pool.slots
    starts = [n * length for n in range(len(load))] if cu_seqlens is None else list(cu_seqlens[:-1])
    flat = tensors.map_tokens(lambda x: x.flatten(0, 1)[:, None])
    o = torch.zeros_like(tensors.v, memory_format=torch.contiguous_format)
    flat_o = o.flatten(0, 1)[:, None]
    final = torch.zeros(len(starts), *states.shape[1:], dtype=compute_dtype(tensors.q), device=device)

    active = [n for n, slots in enumerate(store) if slots]
    S = states[torch.tensor([load[n] for n in active], device=device, dtype=torch.long)].to(compute_dtype(tensors.q))
    S = S.transpose(-1, -2) if options.state_v_first else S
    t = 0
    while active:
        rows = torch.tensor([starts[n] + t for n in active], device=device)
        flat_o[rows] = one_token(flat.map_tokens(partial(_rows, rows)), options, S, S).to(o.dtype)
        stored = S.transpose(-1, -2) if options.state_v_first else S
        if write_back:
            slots = torch.tensor([store[n][t] for n in active], device=device)
            states[slots] = stored.to(states.dtype)
        final[torch.tensor(active, device=device)] = stored
        t += 1
        going = [i for i, n in enumerate(active) if len(store[n]) > t]
        if len(going) < len(active):
            S, active = S[going], [active[i] for i in going]
    return o, final if options.output_final_state else None


def _rows(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x[rows]
