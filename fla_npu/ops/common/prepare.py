"""What happens to the arguments of a call before and after the chunk loop: where its sequences lie, and how a chunk of
the caller's tensors becomes contiguous heads-first working memory (L2 norm, gate and sigmoid applied), and back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fla_npu.ops.common.gate import gate_backward, gate_forward
from fla_npu.ops.common.stages import FORGET, Cumulative, cumulative
from fla_npu.ops.common.workspace import Workspace
from fla_npu.ops.problem import Options, Problem, Tensors
from fla_npu.ops.utils.constant import RCP_LN2

L2NORM_EPS = 1e-6

# Sequences are taken together until this many tokens of heads are in work: enough to fill matrix products, few enough
# to keep what one step needs in cache and to keep memory independent of the batch.
ROWS_PER_STEP = 8192

# Gates per head are so small that a chunk of them costs more in calls than in arithmetic; this many share one.
CHUNKS_PER_GATE_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Run:
    """Equally long sequences that are worked on together."""

    sequence: int
    count: int
    start: int
    """First token within T; 0 unless sequences are packed."""
    length: int
    packed: bool

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Their part of a `[B, T, ...]` tensor, as a view `[count, length, ...]`."""
        if self.packed:
            return x[0, self.start : self.start + self.count * self.length].unflatten(0, (self.count, self.length))
        return x[self.sequence : self.sequence + self.count]

    def tensors_of(self, tensors: Tensors) -> Tensors:
        """Their part of all tensors `[B, T, ...]` of a call; the others as they are."""
        return tensors.map_tokens(self.of)

    def states_of(self, x: torch.Tensor) -> torch.Tensor:
        """Their part of an `[N, ...]` tensor, as a view."""
        return x[self.sequence : self.sequence + self.count]


def runs(problem: Problem, rows_per_step: int = ROWS_PER_STEP) -> Iterator[Run]:
    """All sequences of a call that have tokens. Neighbours of equal length, as decoding has them, form one run."""
    v = problem.tensors.v
    size = problem.options.chunk_size
    B, T, HV = v.shape[:3]

    def cut(sequence: int, count: int, start: int, length: int, packed: bool) -> Iterator[Run]:
        step = max(1, rows_per_step // (HV * min(length, size)))
        for i in range(0, count, step):
            yield Run(sequence + i, min(step, count - i), start + i * length if packed else 0, length, packed)

    if problem.cu_seqlens is None:
        if T > 0 and B > 0:
            yield from cut(0, B, 0, T, False)
        return
    lengths = problem.lengths
    first = 0
    while first < len(lengths):
        last = first
        while last < len(lengths) and lengths[last] == lengths[first]:
            last += 1
        if lengths[first] > 0:
            yield from cut(first, last - first, problem.cu_seqlens[first], lengths[first], True)
        first = last


def working_dtype(q: torch.Tensor) -> torch.dtype:
    """float32, and float64 for float64 inputs (numeric checks of gradients)."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def gate_parameters(tensors: Tensors, options: Options) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`exp(A_log)` and `dt_bias` in working precision, shaped to broadcast over `[..., HV]` or `[..., HV, K]`."""
    dtype = working_dtype(tensors.q)
    channel = options.decay == "channel"
    a, bias = tensors.A_log, tensors.dt_bias
    if a is not None:
        a = a.to(dtype).exp().view((-1, 1) if channel else (-1,))
    if bias is not None:
        bias = bias.to(dtype).view((-1, tensors.q.shape[3]) if channel else (-1,))
    return a, bias


class Chunk(NamedTuple):
    """A chunk of C tokens of N = batch * H heads with R = HV // H value heads each, in working precision."""

    kq: torch.Tensor
    """`[N, 2, C, K]`: k, and q times scale."""
    v: torch.Tensor
    """`[N*R, C, V]`, possibly strided and of the input's dtype."""
    g: Any
    """Binary log decays, at least `FORGET`: `[N, R, C]` and summed (scalar), or `[N, R, C, K]` (channel)."""
    beta: torch.Tensor
    """`[N*R, C, 1]`."""
    inverse_norm: torch.Tensor | None
    """`[N, 2, C, 1]`: what k and q were multiplied with by the L2 norm (without scale)."""

    def piece(self, tokens: slice) -> "Chunk":
        """Some tokens of it, as views."""
        norm = self.inverse_norm
        return Chunk(
            kq=self.kq[:, :, tokens],
            v=self.v[:, tokens],
            g=self.g[:, :, tokens],
            beta=self.beta[:, tokens],
            inverse_norm=None if norm is None else norm[:, :, tokens],
        )


class _Gates(NamedTuple):
    """What is computed for many chunks at once because it is small."""

    start: int
    beta: torch.Tensor
    """`[N*R, tokens, 1]`."""
    g: list[Cumulative] | None
    """Summed decays per head of each chunk; None for decays per channel."""


class Loader:
    """Reads chunks of one run of sequences, and writes their gradients.

    Args:
        tensors: those of the call.
        options: those of the call.
        run: which sequences.
    """

    def __init__(self, tensors: Tensors, options: Options, run: Run) -> None:
        self.options = options
        self.run = run
        self.q, self.k, self.v = (run.of(x).transpose(1, 2) for x in (tensors.q, tensors.k, tensors.v))
        self.beta = run.of(tensors.beta)
        self.g = None if tensors.g is None else run.of(tensors.g)
        self.dtype = working_dtype(tensors.q)
        self.workspace = Workspace(tensors.q, self.dtype)
        self.heads, self.key_dim = self.q.shape[1], self.q.shape[3]
        self.value_heads = self.v.shape[1]
        self.g_tail = (self.key_dim,) if options.decay == "channel" else ()
        self._current: _Gates | None = None
        self.a, self.bias = gate_parameters(tensors, options)

    def load(self, tokens: slice) -> Chunk:
        """One chunk, or a piece of it for decays per channel."""
        n, H, C, K = self.k[:, :, tokens].shape
        kq = self.workspace.take("kq", n, H, 2, C, K)
        if self.options.qk_l2norm:
            inverse_norm = self.workspace.take("norm", n, H, 2, C, 1)
            self._normalised(self.k[:, :, tokens], 1.0, kq[:, :, 0], inverse_norm[:, :, 0])
            self._normalised(self.q[:, :, tokens], self.options.scale, kq[:, :, 1], inverse_norm[:, :, 1])
            inverse_norm = inverse_norm.view(n * H, 2, C, 1)
        else:
            inverse_norm = None
            kq[:, :, 0].copy_(self.k[:, :, tokens])
            _times(self.q[:, :, tokens], self.options.scale, kq[:, :, 1])
        gates = self._gates(tokens)
        i = tokens.start - gates.start
        if gates.g is None:
            g = self._decay(tokens).view(n * H, -1, C, K)
        else:
            g = gates.g[i // self.options.chunk_size]
        return Chunk(
            kq=kq.view(n * H, 2, C, K),
            v=self.v[:, :, tokens].reshape(n * self.value_heads, C, -1),
            g=g,
            beta=gates.beta[:, i : i + C],
            inverse_norm=inverse_norm,
        )

    def _normalised(self, x: torch.Tensor, factor: float, out: torch.Tensor, inverse_norm: torch.Tensor) -> None:
        """Write x `[count, H, C, K]` over its norm, times factor, to `out`."""
        if x.stride(-1) != 1:
            x = out.copy_(x)  # as transformers passes it, with T fastest: rows are read once only
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self.dtype, out=inverse_norm)
        inverse_norm.square_().add_(L2NORM_EPS).rsqrt_()
        torch.mul(x, inverse_norm if factor == 1.0 else inverse_norm * factor, out=out)

    def _gates(self, tokens: slice) -> "_Gates":
        """beta, and decays per head, of the block of chunks that these tokens lie in."""
        size = self.options.chunk_size
        block = CHUNKS_PER_GATE_BLOCK * size
        start = tokens.start // block * block
        if self._current is None or self._current.start != start:
            self._current = None  # freed before the next one is made
            inside = slice(start, min(start + block, self.run.length))
            n, C, HV = self.beta[:, inside].shape
            beta = self._beta(inside).transpose(1, 2).reshape(n * HV, C, 1)
            g = None
            if self.options.decay != "channel":
                full = C // size * size
                decay = self._decay(inside).view(n * self.heads, -1, C)
                sums = cumulative(decay[..., :full].unflatten(-1, (C // size, size)))
                g = [Cumulative(*chunk) for chunk in zip(*(x.unbind(2) for x in sums), strict=True)]
                if full < C:
                    g.append(cumulative(decay[..., full:]))
            self._current = _Gates(start, beta, g)
        return self._current

    def _decay(self, tokens: slice) -> torch.Tensor:
        """Binary log decay `[count, HV, C(, K)]`, at least `FORGET`."""
        n, C, HV = self.beta[:, tokens].shape
        out = self.workspace.take("g", n, HV, C, *self.g_tail)
        if self.g is None:
            return out.zero_()
        g = self.g[:, tokens]
        if self.options.gate != "none":
            g = gate_forward(g.to(self.dtype), self.a, self.bias, self.options.gate, self.options.lower_bound)
        return _times(g.transpose(1, 2), RCP_LN2, out).clamp_min_(FORGET)

    def _beta(self, tokens: slice) -> torch.Tensor:
        """`[count, C, HV]`."""
        beta = self.beta[:, tokens].to(self.dtype)
        return torch.sigmoid(beta).mul_(self.options.beta_scale) if self.options.beta_sigmoid else beta

    def store_gradients(
        self,
        tokens: slice,
        chunk: Chunk,
        into: Tensors,
        *,
        dkq: torch.Tensor,
        dv: torch.Tensor,
        dg: torch.Tensor,
        dbeta: torch.Tensor,
    ) -> None:
        """Write the gradients of a chunk, shaped as in `Chunk`, to their place in the call's gradients `into`.

        Those of `A_log` and `dt_bias` are added to what is there.
        """
        options, run = self.options, self.run
        n, H, HV = run.count, self.heads, self.value_heads
        C = dkq.shape[2]
        if chunk.inverse_norm is not None:
            # x/|x| = y: dx = (dy - y (y . dy)) / |x|, with y the normalised rows (q's without scale).
            dkq[:, 1].mul_(options.scale)
            unit = chunk.kq.clone()
            unit[:, 1].div_(options.scale or 1.0)
            dkq.sub_(unit * (unit * dkq).sum(-1, keepdim=True)).mul_(chunk.inverse_norm)
        else:
            dkq[:, 1].mul_(options.scale)
        dkq = dkq.view(n, H, 2, C, -1)
        run.of(into.k)[:, tokens].copy_(dkq[:, :, 0].transpose(1, 2))
        run.of(into.q)[:, tokens].copy_(dkq[:, :, 1].transpose(1, 2))
        run.of(into.v)[:, tokens].copy_(dv.view(n, HV, C, -1).transpose(1, 2))

        dbeta = dbeta.view(n, HV, C).transpose(1, 2)
        if options.beta_sigmoid:
            s = torch.sigmoid(self.beta[:, tokens].to(self.dtype))
            dbeta = dbeta * (options.beta_scale * s * (1 - s))
        run.of(into.beta)[:, tokens].copy_(dbeta)

        if self.g is None or into.g is None:
            return
        dg = dg.reshape(n, HV, C, *self.g_tail).transpose(1, 2)
        if options.gate != "none":
            logits = self.g[:, tokens].to(self.dtype)
            dg, d_a_log = gate_backward(logits, self.a, self.bias, options.gate, options.lower_bound, dg)
            if into.A_log is not None:
                into.A_log.add_(d_a_log.sum(tuple(i for i in range(d_a_log.ndim) if i != 2)))
            if into.dt_bias is not None:
                into.dt_bias.add_(dg.sum((0, 1)).view(-1))
        run.of(into.g)[:, tokens].copy_(dg)


def _times(x: torch.Tensor, factor: float, out: torch.Tensor) -> torch.Tensor:
    """x times a number in the precision of `out`, which the product with a 16-bit x would not have."""
    return torch.mul(x, factor, out=out) if x.dtype == out.dtype else out.copy_(x).mul_(factor)
