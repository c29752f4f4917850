"""What happens to the arguments of a call before and after the chunk loop: where its sequences lie, and how a chunk of
the caller's tensors becomes contiguous heads-first working memory (L2 norm, gate and sigmoid applied), and back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fla_npu.dtypes import compute_dtype
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

    def of(self, x: torch.Tensor, rows: int = 1) -> torch.Tensor:
        """Their part of a `[B, T * rows, ...]` tensor, as a view `[count, length * rows, ...]`."""
        if self.packed:
            start, length = self.start * rows, self.length * rows
            return x[0, start : start + self.count * length].unflatten(0, (self.count, length))
        return x[self.sequence : self.sequence + self.count]

    def tensors_of(self, tensors: Tensors, updates: int) -> Tensors:
        """Their part of all tensors `[B, T, ...]` of a call; the others as they are."""
        part = tensors.map_tokens(self.of)
        if updates == 1:
            return part
        beta = None if tensors.beta is None else self.of(tensors.beta, updates)
        return part._replace(k=self.of(tensors.k, updates), v=self.of(tensors.v, updates), beta=beta)

    def states_of(self, x: torch.Tensor) -> torch.Tensor:
        """Their part of an `[N, ...]` tensor, as a view."""
        return x[self.sequence : self.sequence + self.count]


def runs(problem: Problem, rows_per_step: int = ROWS_PER_STEP) -> Iterator[Run]:
    """All sequences of a call that have tokens. Neighbours of equal length, as decoding has them, form one run."""
    size = problem.options.chunk_size
    B, T = problem.tensors.q.shape[:2]
    rows = problem.tensors.v.shape[2] * problem.options.updates

    def cut(sequence: int, count: int, start: int, length: int, packed: bool) -> Iterator[Run]:
        step = max(1, rows_per_step // (rows * min(length, size)))
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


def gate_parameters(tensors: Tensors, options: Options) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`exp(A_log)` and `dt_bias` in working precision, shaped to broadcast over `[..., HV]` or `[..., HV, K]`."""
    dtype = compute_dtype(tensors.q)
    channel = options.decay == "channel"
    a, bias = tensors.A_log, tensors.dt_bias
    if a is not None:
        a = a.to(dtype).exp().view((-1, 1) if channel else (-1,))
    if bias is not None:
        bias = bias.to(dtype).view((-1, tensors.q.shape[3]) if channel else (-1,))
    return a, bias


class Chunk(NamedTuple):
    """A chunk of Q tokens of N = batch * H heads with R = HV // H value heads each, in working precision. The C rows of
    k, v and beta are Q * `Options.updates`."""

    kq: torch.Tensor
    """k, and q times scale: `[N, C + Q, K]` (scalar), or `[N, 2, C, K]` (channel)."""
    v: torch.Tensor
    """`[N*R, C, V]`, possibly strided and of the input's dtype; times the write gate."""
    g: Any
    """Binary log decays, at least `FORGET`: `[N, R, C]` and summed (scalar), or `[N, R, C, K]` (channel)."""
    beta: torch.Tensor | None
    """`[N*R, C, 1]`; None without the delta rule."""
    inverse_norm: torch.Tensor | None
    """What k and q were multiplied with by the L2 norm (without scale): as `kq`, with 1 for K."""
    b: torch.Tensor | None = None
    """The erase gate, `[N, R, C, K]`."""

    def piece(self, tokens: slice) -> "Chunk":
        """Some tokens of it, as views; for decays per channel."""
        norm = self.inverse_norm
        return Chunk(
            kq=self.kq[:, :, tokens],
            v=self.v[:, tokens],
            g=self.g[:, :, tokens],
            beta=None if self.beta is None else self.beta[:, tokens],
            inverse_norm=None if norm is None else norm[:, :, tokens],
            b=None if self.b is None else self.b[:, :, tokens],
        )


class _Gates(NamedTuple):
    """What is computed for many chunks at once because it is small."""

    start: int
    beta: torch.Tensor | None
    """`[N*R, rows, 1]`."""
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
        self.updates = options.updates
        self.q = run.of(tensors.q).transpose(1, 2)
        self.k, self.v = (run.of(x, self.updates).transpose(1, 2) for x in (tensors.k, tensors.v))
        self.beta = None if tensors.beta is None else run.of(tensors.beta, self.updates)
        self.b, self.w = (None if x is None else run.of(x).transpose(1, 2) for x in (tensors.b, tensors.w))
        self.g = None if tensors.g is None else run.of(tensors.g)
        self.dtype = compute_dtype(tensors.q)
        self.workspace = Workspace(tensors.q, self.dtype)
        self.heads, self.key_dim = self.q.shape[1], self.q.shape[3]
        self.value_heads = self.v.shape[1]
        self.g_tail = (self.key_dim,) if options.decay == "channel" else ()
        self._current: _Gates | None = None
        self.a, self.bias = gate_parameters(tensors, options)

    def load(self, tokens: slice) -> Chunk:
        """One chunk, or a piece of it for decays per channel."""
        rows = self._rows(tokens)
        k, q = self.k[:, :, rows], self.q[:, :, tokens]
        n, H, C, K = k.shape
        both = C + q.shape[2]
        kq = self.workspace.take("kq", n, H, both, K)
        inverse_norm = None
        if self.options.qk_l2norm:
            inverse_norm = self.workspace.take("norm", n, H, both, 1)
            self._normalised(k, 1.0, kq[:, :, :C], inverse_norm[:, :, :C])
            self._normalised(q, self.options.scale, kq[:, :, C:], inverse_norm[:, :, C:])
        else:
            kq[:, :, :C].copy_(k)
            _times(q, self.options.scale, kq[:, :, C:])
        gates = self._gates(tokens)
        i = tokens.start - gates.start
        if gates.g is None:
            g = self._decay(tokens).view(n * H, -1, C, K)
            shape: tuple[int, ...] = (n * H, 2, C)
        else:
            g = gates.g[i // self.options.chunk_size]
            shape = (n * H, both)
        i *= self.updates
        return Chunk(
            kq=kq.view(*shape, K),
            v=self._written(rows).reshape(n * self.value_heads, C, -1),
            g=g,
            beta=None if gates.beta is None else gates.beta[:, i : i + C],
            inverse_norm=None if inverse_norm is None else inverse_norm.view(*shape, 1),
            b=None if self.b is None else self._copied("erase", self.b[:, :, rows]).view(n * H, -1, C, K),
        )

    def _rows(self, tokens: slice) -> slice:
        """Where k, v and beta have these tokens."""
        return slice(tokens.start * self.updates, tokens.stop * self.updates)

    def _written(self, rows: slice) -> torch.Tensor:
        """v times the write gate, `[count, HV, C, V]`."""
        v = self.v[:, :, rows]
        return v if self.w is None else self._copied("written", v).mul_(self.w[:, :, rows])

    def _copied(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x in working precision, contiguous."""
        return self.workspace.take(name, *x.shape).copy_(x)

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
            rows = self._rows(inside)
            n, HV, C = *self.v.shape[:2], rows.stop - rows.start
            beta = None if self.beta is None else self._beta(self.beta[:, rows])
            beta = None if beta is None else beta.transpose(1, 2).reshape(n * HV, C, 1)
            g = None
            if self.options.decay != "channel":
                size *= self.updates
                full = C // size * size
                decay = self._decay(inside).view(n * self.heads, -1, C)
                sums = cumulative(decay[..., :full].unflatten(-1, (C // size, size)))
                g = [Cumulative(*chunk) for chunk in zip(*(x.unbind(2) for x in sums), strict=True)]
                if full < C:
                    g.append(cumulative(decay[..., full:]))
            self._current = _Gates(start, beta, g)
        return self._current

    def _decay(self, tokens: slice) -> torch.Tensor:
        """Binary log decay `[count, HV, C(, K)]`, at least `FORGET`; a token's is that of its first update."""
        rows = self._rows(tokens)
        out = self.workspace.take("g", *self.v.shape[:2], rows.stop - rows.start, *self.g_tail)
        if self.g is None:
            return out.zero_()
        if self.updates > 1:
            out.zero_()
        g = self.g[:, tokens]
        if self.options.gate != "none":
            g = gate_forward(g.to(self.dtype), self.a, self.bias, self.options.gate, self.options.lower_bound)
        _times(g.transpose(1, 2), RCP_LN2, out[:, :, :: self.updates])
        return out.clamp_min_(FORGET)

    def _beta(self, beta: torch.Tensor) -> torch.Tensor:
        """beta from what is passed for it, in working precision."""
        beta = beta.to(self.dtype)
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
        dbeta: torch.Tensor | None,
        db: torch.Tensor | None,
    ) -> None:
        """Write the gradients of a chunk, shaped as in `Chunk`, to their place in the call's gradients `into`.

        Those of `A_log` and `dt_bias` are added to what is there.
        """
        options, run, updates = self.options, self.run, self.updates
        n, H, HV = run.count, self.heads, self.value_heads
        rows = self._rows(tokens)
        C = rows.stop - rows.start
        dkq = dkq.view(n, H, -1, self.key_dim)
        dkq[:, :, C:].mul_(options.scale)
        if chunk.inverse_norm is not None:
            # x/|x| = y: dx = (dy - y (y . dy)) / |x|, with y the normalised rows (q's without scale).
            unit = chunk.kq.reshape(dkq.shape).clone()
            unit[:, :, C:].div_(options.scale or 1.0)
            norm = chunk.inverse_norm.reshape(*dkq.shape[:3], 1)
            dkq.sub_(unit * (unit * dkq).sum(-1, keepdim=True)).mul_(norm)
        run.of(into.k, updates)[:, rows].copy_(dkq[:, :, :C].transpose(1, 2))
        run.of(into.q)[:, tokens].copy_(dkq[:, :, C:].transpose(1, 2))
        dv = dv.view(n, HV, C, -1)
        if self.w is not None and into.w is not None:
            run.of(into.w)[:, rows].copy_((dv * self.v[:, :, rows]).transpose(1, 2))
            dv = dv * self.w[:, :, rows]
        run.of(into.v, updates)[:, rows].copy_(dv.transpose(1, 2))
        if db is not None and into.b is not None:
            run.of(into.b)[:, rows].copy_(db.view(n, HV, C, -1).transpose(1, 2))

        if self.beta is not None and into.beta is not None and dbeta is not None:
            dbeta = dbeta.view(n, HV, C).transpose(1, 2)
            if options.beta_sigmoid:
                s = torch.sigmoid(self.beta[:, rows].to(self.dtype))
                dbeta = dbeta * (options.beta_scale * s * (1 - s))
            run.of(into.beta, updates)[:, rows].copy_(dbeta)

        if self.g is None or into.g is None:
            return
        dg = dg.reshape(n, HV, C, *self.g_tail)[:, :, ::updates].transpose(1, 2)
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
