"""The portable backward pass: the chunks in reverse, each recomputed from the state at its start.

Per chunk, with `dS` the gradient of the state after it (stages of `stages.py`, A without beta):

    du  = P^T dO + write_backward(dS)           dP = dO u^T where P is not zero
    db  = (I + beta A)^-T du                    d(beta A) = -strict_lower(db u^T)
    b   = beta (V - X_k)                        dV = beta db,  dX_k = -beta db,  dX_q = dO
    d beta = db . (V - X_k) + sum_j d(beta A)_ij A_ij

(without the delta rule only dV = du, dP and dX_q), and the decay turns the gradients of A, P, X and the new state into
those of q, k, g and the old state. Memory: the inputs' gradients and one state per chunk of the sequences in work.
"""

from typing import Any

import torch

from fla_npu.dtypes import compute_dtype
from fla_npu.ops.common.chunked import (
    Decay,
    KeptStates,
    chunks,
    decay_of,
    initial_states,
    state_kind,
    steps,
    written,
)
from fla_npu.ops.common.prepare import Chunk, Loader, runs
from fla_npu.ops.common.solve import solve_unit_lower
from fla_npu.ops.problem import Problem, Tensors


def chunked_backward(
    problem: Problem, do: torch.Tensor, d_final: torch.Tensor | None, kept: KeptStates | None
) -> Tensors:
    """Gradients of a call.

    Args:
        problem: the call, with the tensors of its forward pass.
        do: gradient of o, `[B,T,HV,V]`.
        d_final: gradient of the final state in the call's layout, or None.
        kept: the state before every chunk, from `chunked_forward`; None recomputes them.

    Returns:
        The gradient of every tensor of the call, of its shape and dtype; None where the call has none.
    """
    tensors, options, _ = problem
    dtype = compute_dtype(tensors.q)
    # A parameter's gradient sums over all tokens and needs more digits than its own dtype may have.
    empty: list[Any] = [None if x is None else torch.empty_like(x) for x in tensors]
    grads = Tensors(*empty)._replace(
        A_log=None if tensors.A_log is None else torch.zeros_like(tensors.A_log, dtype=dtype),
        dt_bias=None if tensors.dt_bias is None else torch.zeros_like(tensors.dt_bias, dtype=dtype),
    )
    dS0 = grads.initial_state
    if dS0 is not None:
        # What a sequence without tokens hands through; the others are overwritten below.
        dS0.zero_() if d_final is None else dS0.copy_(d_final)
    states = None if kept is None else iter(kept)
    for run in runs(problem):
        loader = Loader(tensors, options, run)
        if states is None:
            before = _states_before(loader, initial_states(problem, run))
        else:  # copies, since the backward pass rescales states and may be called again
            before = [next(states).clone() for _ in chunks(loader)]
        dS = torch.zeros_like(before[0])
        if d_final is not None:
            d_run = run.states_of(d_final)
            d_run = d_run.transpose(-1, -2) if options.state_v_first else d_run
            dS = state_kind(options).load_state(d_run.to(dtype), loader.heads)
        do_run = run.of(do)
        for tokens in reversed(chunks(loader)):
            # Popping frees each state as soon as it has served.
            dS = _chunk_backward(loader, tokens, before.pop(), dS, do_run, grads)
        if dS0 is not None:
            target = run.states_of(dS0)
            target = target.transpose(-1, -2) if options.state_v_first else target
            target.copy_(state_kind(options).store_state(dS, run.count))
    return grads._replace(A_log=_like(grads.A_log, tensors.A_log), dt_bias=_like(grads.dt_bias, tensors.dt_bias))


def _like(grad: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None or x is None else grad.to(x.dtype)


def _states_before(loader: Loader, S0: torch.Tensor) -> list[torch.Tensor]:
    """The state before every chunk of a run."""
    S = state_kind(loader.options).load_state(S0, loader.heads)
    states = []
    for tokens in chunks(loader):
        states.append(S.clone())
        for _, chunk, decay in steps(loader, tokens):
            A, _ = decay.attend_(S)
            decay.write_(S, written(loader, chunk, decay, A))
    return states


def _chunk_backward(
    loader: Loader, tokens: slice, S: torch.Tensor, dS: torch.Tensor, do: torch.Tensor, grads: Tensors
) -> torch.Tensor:
    """Store the gradients of one chunk; returns that of the state before it. S is lost."""
    earlier: list[tuple[slice, type[Decay], torch.Tensor]] = []
    for step, chunk, decay in steps(loader, tokens):
        if step.stop == tokens.stop:
            dS = _step_backward(loader, step, chunk, decay, S, dS, do, grads)
            break
        earlier.append((step, type(decay), S.clone()))
        A, _ = decay.attend_(S)
        decay.write_(S, written(loader, chunk, decay, A))
    for step, kind, S in reversed(earlier):
        chunk = loader.load(step)
        dS = _step_backward(loader, step, chunk, decay_of(kind, chunk, loader), S, dS, do, grads)
    return dS


def _step_backward(
    loader: Loader,
    step: slice,
    chunk: Chunk,
    decay: Decay,
    S: torch.Tensor,
    dS: torch.Tensor,
    do: torch.Tensor,
    grads: Tensors,
) -> torch.Tensor:
    """Store the gradients of one step; returns that of the state before it."""
    A, P = decay.attend_(S)
    X = decay.read()
    dO = do[:, step].transpose(1, 2).reshape(*P.shape[:2], -1).to(P.dtype)
    if A is None or chunk.beta is None:
        u = written(loader, chunk, decay, A)
        dv = torch.baddbmm(decay.write_backward(dS), P.mT, dO)
        back = decay.backward_(None, torch.bmm(dO, u.mT), dO, dS, u, S)
        loader.store_gradients(step, chunk, grads, dkq=back.kq, dv=dv, dg=back.g, dbeta=None, db=None)
        return back.S

    w = torch.sub(chunk.v, X[:, : A.shape[1]])
    T = A * chunk.beta
    u = solve_unit_lower(T, w * chunk.beta)
    du = torch.baddbmm(decay.write_backward(dS), P.mT, dO)
    db = solve_unit_lower(T, du, transpose=True)
    dT = torch.bmm(db, u.mT).tril_(-1).neg_()
    dbeta = (db * w).sum(-1) + (dT * A).sum(-1)
    dv = db * chunk.beta
    dX = torch.cat((dv.neg(), dO), dim=1)
    back = decay.backward_(dT.mul_(chunk.beta), torch.bmm(dO, u.mT), dX, dS, u, S)
    loader.store_gradients(step, chunk, grads, dkq=back.kq, dv=dv, dg=back.g, dbeta=dbeta, db=back.b)
    return back.S
