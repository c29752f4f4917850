"""The portable forward pass: plain PyTorch, chunk by chunk, with the state updated in place.

For any device that PyTorch runs on: the path of CPUs, and of NPUs that Triton does not reach. Beyond inputs and outputs
it needs one state and the working memory of one chunk, whatever T is.
"""

from collections.abc import Iterator
from itertools import accumulate

import torch

from fla_npu.dtypes import compute_dtype
from fla_npu.ops.common.prepare import Chunk, Loader, Run, runs
from fla_npu.ops.common.solve import solve_unit_lower
from fla_npu.ops.common.stages import LevelDecay, ReferencedDecay, ScalarDecay, referenced_size
from fla_npu.ops.common.step import one_token
from fla_npu.ops.problem import Options, Problem

Decay = ScalarDecay | ReferencedDecay | LevelDecay


class KeptStates(list[torch.Tensor]):
    """The state before every chunk, in the order of the forward pass. A class, lest functorch takes it for a pytree."""


def chunked_forward(
    problem: Problem, kept: KeptStates | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run a call.

    Args:
        problem: the call.
        kept: receives the state before every chunk, for `chunked_backward`.

    Returns:
        `o [B,T,HV,V]` in the dtype of v, the final state `[N,HV,K,V]` or V-first in float32 if asked for, and the
        states at the start of every chunk `[B,NT,HV,K,V]` or V-first in the dtype of k if asked for.
    """
    tensors, options, _ = problem
    o = torch.empty(*tensors.q.shape[:2], *tensors.v.shape[2:], dtype=tensors.v.dtype, device=tensors.v.device)
    final = _FinalStates(problem) if options.output_final_state else None
    between = _ChunkStates(problem) if options.return_intermediate_states else None
    for run in runs(problem):
        S = initial_states(problem, run)
        final_of_run = None if final is None else run.states_of(final.k_first)
        if run.length == 1 and between is None and kept is None:
            run.of(o).copy_(one_token(run.tensors_of(tensors, options.updates), options, S, final_of_run))
            continue
        S = _walk(Loader(tensors, options, run), S, run.of(o), between, kept)
        if final_of_run is not None:
            final_of_run.copy_(S)
    return o, None if final is None else final.states, None if between is None else between.states


def _walk(
    loader: Loader,
    S0: torch.Tensor,
    o: torch.Tensor,
    between: "_ChunkStates | None",
    kept: KeptStates | None,
) -> torch.Tensor:
    """Forward over one run; returns its final states, K-first."""
    count = loader.run.count
    o = o.transpose(1, 2)
    S = state_kind(loader.options).load_state(S0, loader.heads)
    for tokens in chunks(loader):
        if between is not None:
            between.put(loader.run, tokens, state_kind(loader.options).store_state(S, count))
        if kept is not None:
            kept.append(S.clone())
        for step, chunk, decay in steps(loader, tokens):
            A, P = decay.attend_(S)
            u = written(loader, chunk, decay, A)
            within = torch.bmm(P, u, out=loader.workspace.take("within", *P.shape[:2], u.shape[2]))
            decay.output(within, o[:, :, step])
            decay.write_(S, u)
    return state_kind(loader.options).store_state(S, count)


def state_kind(options: Options) -> type[ScalarDecay] | type[ReferencedDecay]:
    """The class whose layout the states of a call have: all classes of one kind of decay share it."""
    return ReferencedDecay if options.decay == "channel" else ScalarDecay


def chunks(loader: Loader) -> list[slice]:
    """The chunks of every sequence of a run."""
    size, length = loader.options.chunk_size, loader.run.length
    return [slice(t, min(t + size, length)) for t in range(0, length, size)]


def steps(loader: Loader, tokens: slice) -> Iterator[tuple[slice, Chunk, Decay]]:
    """What of a chunk is worked on together, one step after the other: all of it, or a piece.

    Decays per channel that are too strong for the cheap way may still suit it in halves or quarters of a chunk, which
    costs less than the other way on the whole.
    """
    chunk = loader.load(tokens)
    size = C = tokens.stop - tokens.start
    kind: type[Decay] = ScalarDecay
    if loader.options.decay == "channel":
        fitting = referenced_size(chunk.g)
        kind, C = (ReferencedDecay, fitting) if fitting else (LevelDecay, size)
    for i in range(0, size, C):
        piece = chunk if size == C else chunk.piece(slice(i, i + C))
        yield slice(tokens.start + i, tokens.start + i + C), piece, decay_of(kind, piece, loader)


def decay_of(kind: type[Decay], chunk: Chunk, loader: Loader) -> Decay:
    """The decay of one step."""
    workspace, delta = loader.workspace, loader.beta is not None
    if issubclass(kind, ScalarDecay):
        return kind(chunk.kq, chunk.g, workspace, delta)
    return kind(chunk.kq, chunk.g, workspace, delta, chunk.b)


def written(loader: Loader, chunk: Chunk, decay: Decay, A: torch.Tensor | None) -> torch.Tensor:
    """u `[N*R, C, V]` of one step, given A from `attend_`: by Solve, or v itself without the delta rule."""
    if A is None or chunk.beta is None:
        return loader.workspace.take("u", *chunk.v.shape).copy_(chunk.v)
    b = decay.residual(chunk.v, chunk.beta)
    return solve_unit_lower(torch.mul(A, chunk.beta, out=loader.workspace.take("T", *A.shape)), b, out=b)


def initial_states(problem: Problem, run: Run) -> torch.Tensor:
    """The initial states `[count,HV,K,V]` of a run in working precision; possibly the caller's own memory."""
    tensors, options, _ = problem
    dtype = compute_dtype(tensors.q)
    if tensors.initial_state is None:
        return torch.zeros(run.count, *_state_shape(problem), dtype=dtype, device=tensors.v.device)
    S = run.states_of(tensors.initial_state).to(dtype)
    return S.transpose(-1, -2) if options.state_v_first else S


def _state_shape(problem: Problem) -> tuple[int, int, int]:
    """`(HV, K, V)`."""
    q, _, v = problem.tensors[:3]
    return v.shape[2], q.shape[3], v.shape[3]


class _FinalStates:
    """The final states `[N,HV,K,V]` or V-first; sequences without tokens keep their initial state."""

    def __init__(self, problem: Problem) -> None:
        tensors, options, _ = problem
        HV, K, V = _state_shape(problem)
        shape = (len(problem.lengths), HV, *((V, K) if options.state_v_first else (K, V)))
        self.states = torch.empty(shape, dtype=compute_dtype(tensors.q), device=tensors.v.device)
        if 0 in problem.lengths:
            self.states.zero_() if tensors.initial_state is None else self.states.copy_(tensors.initial_state)
        self.k_first = self.states.transpose(-1, -2) if options.state_v_first else self.states


class _ChunkStates:
    """The states at the start of every chunk: `[B,NT,HV,K,V]` or V-first, with all chunks of a pack in one row."""

    def __init__(self, problem: Problem) -> None:
        tensors, options, cu_seqlens = problem
        self.size = options.chunk_size
        HV, K, V = _state_shape(problem)
        B, T = tensors.q.shape[:2]
        lengths = [T] if cu_seqlens is None else problem.lengths
        self.offsets = [0, *accumulate(-(-length // self.size) for length in lengths)]
        self.states = tensors.k.new_empty(B, self.offsets[-1], HV, *((V, K) if options.state_v_first else (K, V)))
        self.k_first = self.states.transpose(-1, -2) if options.state_v_first else self.states

    def put(self, run: Run, tokens: slice, S: torch.Tensor) -> None:
        """Keep the states `[count,HV,K,V]` of a run before these tokens."""
        chunk = tokens.start // self.size
        if run.packed:
            per_sequence = -(-run.length // self.size)
            first = self.offsets[run.sequence]
            self.k_first[0, first + chunk : first + run.count * per_sequence : per_sequence].copy_(S)
        else:
            run.states_of(self.k_first)[:, chunk].copy_(S)
