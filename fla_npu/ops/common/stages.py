"""The stages of one chunk of linear attention, forward and backward, for all heads at once; with the delta rule:

With the state `S` at the start of a chunk of C tokens, `D_ij = exp(g_{j+1} + ... + g_i)` the decay from token j to
token i, and per row i of the chunk (scalar decay: a number per row; channel decay: inside the sums over K):

    scores   A_ij = D_ij k_i . k_j  (j < i)     P_ij = D_ij q_i . k_j  (j <= i)
    read     X_k = decay_i * (K S)              X_q = decay_i * (Q S)
    Solve    (I + beta * A) u = beta * (V - X_k)
    output   O = X_q + P u
    write    S <- decay_C * S + (decay_{i..C} * K)^T u

That is the reordered dataflow of the HA-NPU paper: every product with S, K and Q comes before Solve, W = T K is never
formed and one state lives on core. The classes here supply scores, read and write for the two kinds of decay, with
their gradients; `chunked.py` and `chunked_bwd.py` hold what does not depend on the decay.

Variants change the rows that read, those of the products with S and K, and nothing else. With several updates per
token (Gated DeltaProduct) q has a row per token and k one per update. With an erase gate (GDN-2) A and X_k are formed
with the rows b * k instead of k; its write gate is no concern of a chunk, which gets w * v for v and 1 for beta.
Without the delta rule (GLA, simple GLA, retention) only q reads: there are no A and X_k, and u is v.

Decays are kept as binary logarithms: `exp2` costs the same for every argument, whereas `exp` of a CPU's vector library
takes a hundred times longer as soon as a result underflows (measured: 9 us against 1365 us for 65536 numbers at -88).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fla_npu.ops.common.workspace import Workspace

# Decays below 2^-100 count as zero: that is 1e23 times below the rounding of what they are added to, and their
# products with keys would be denormal numbers, which slow a matrix product down 200 times. Where two factors make up a
# decay, each has half of that.
NEGLIGIBLE = -100.0
NEGLIGIBLE_FACTOR = NEGLIGIBLE / 2

# The smallest log decay of one token. It stands for "forget everything", and unlike -inf it can be subtracted.
FORGET = -1024.0

# Cumulative scalar decays are split into multiples of this and a rest. A sum of 64 such multiples, each at most
# |FORGET|, has at most 24 bits, so that it and the differences of two of them are exact in float32. Without the split,
# one strong decay early in a chunk costs all later ones their digits.
QUANTUM = 2.0**-8

# Largest exponent that `ReferencedDecay` gives to a factor: products of two factors stay below 2^120 < 2^127, and the
# rounding of the exponent itself, 2^-19, keeps a chunk's scores at an NMSE of 2e-12.
REACH = 60.0


def exp2_(x: torch.Tensor, negligible: float = NEGLIGIBLE) -> torch.Tensor:
    """`2^x` in place, exactly zero below `2^negligible`."""
    return torch.threshold_(x, negligible, float("-inf")).exp2_()


class Gradients(NamedTuple):
    """What a decay hands back from its part of the backward pass."""

    kq: torch.Tensor
    """Shaped as given."""
    g: torch.Tensor
    """Of the (natural) log decay: `[N, R, C]` or `[N, R, C, K]`."""
    S: torch.Tensor
    """Of the state at the start of the chunk."""
    b: torch.Tensor | None = None
    """Of the erase gate, `[N, R, C, K]`."""


class Cumulative(NamedTuple):
    """Scalar log decays of chunks, summed: `[..., C]` each, from `cumulative`."""

    coarse: torch.Tensor
    """From the start of the chunk to each token, in multiples of `QUANTUM`."""
    fine: torch.Tensor
    """What is missing in `coarse`."""
    reading: torch.Tensor
    """The decay from the start of the chunk to each token."""
    writing: torch.Tensor
    """The decay from each token to the end of the chunk."""


def cumulative(g: torch.Tensor) -> Cumulative:
    """Sums of binary log decays `[..., C]`, at least `FORGET` each, over the chunks along the last dimension."""
    coarse = (g / QUANTUM).round_().mul_(QUANTUM)
    fine = (g - coarse).cumsum(-1)
    coarse = coarse.cumsum(-1)
    reading = exp2_(coarse + fine)
    writing = exp2_((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine))
    return Cumulative(coarse, fine, reading, writing)


class ScalarDecay:
    """One decay per value head and token (GDN). Query/key work is shared by the R value heads of a group.

    Args:
        kq: `[N, C + Q, K]`, C rows of k, then Q of the scaled q, of N = batch * H heads. C is a multiple of Q: each q
            comes after C / Q rows of k.
        g: the summed decays, `[N, R, C]`.
        workspace: where results of its methods lie until the next chunk.
        delta: whether k reads the state too (the delta rule); Q is C otherwise.

    States are `[N, K, R, V]`.
    """

    def __init__(self, kq: torch.Tensor, g: Cumulative, workspace: Workspace, delta: bool) -> None:
        self.take = workspace.take
        self.coarse, self.fine, self.reading, self.writing = g
        C = self.reading.shape[-1]
        self.k = kq[:, :C]
        self.keys = C if delta else 0
        self.readers = kq if delta else kq[:, C:]
        self.above = workspace.constant("above", C, _above)
        updates = C // (kq.shape[1] - C)
        self.after = slice(updates - 1, None, updates)

    @staticmethod
    def load_state(state: torch.Tensor, heads: int) -> torch.Tensor:
        """`[B, HV, K, V]` to a new tensor in this class's layout."""
        B, HV, K, V = state.shape
        grouped = state.unflatten(1, (heads, HV // heads)).transpose(2, 3)
        return grouped.clone(memory_format=torch.contiguous_format).view(B * heads, K, HV // heads, V)

    @staticmethod
    def store_state(S: torch.Tensor, batch: int) -> torch.Tensor:
        """The inverse of `load_state`, as a view where that is possible."""
        N, K, R, V = S.shape
        return S.view(batch, N // batch, K, R, V).transpose(2, 3).reshape(batch, -1, K, V)

    def attend_(self, S: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The products of a chunk with its keys and the state; what they read is kept for the methods below.

        S may be rescaled in place; it is only good for the methods below afterwards, and whole again after `write_`.

        Returns:
            `A [N*R, C, C]` (anything on and above the diagonal), None without the delta rule; `P [N*R, Q, C]` (zero
            where k comes after q).
        """
        N, rows, K = self.readers.shape
        R, V = S.shape[2:]
        C = self.k.shape[1]
        raw = torch.bmm(self.readers, S.view(N, K, R * V), out=self.take("raw", N, rows, R * V))
        self.raw = raw.view(N, rows, R, V).transpose(1, 2)
        G = torch.bmm(self.readers, self.k.mT, out=self.take("G", N, rows, C)).view(N, 1, rows, C)
        D = torch.sub(self.coarse[..., :, None], self.coarse[..., None, :], out=self.take("D", N, R, C, C))
        D.add_(self.fine[..., :, None]).sub_(self.fine[..., None, :]).add_(self.above)
        self.D = exp2_(D)
        Q = rows - self.keys
        self.P = torch.mul(G[:, :, self.keys :], D[:, :, self.after], out=self.take("P", N, R, Q, C))
        P = self.P.view(N * R, Q, C)
        if not self.keys:
            return None, P
        self.A = torch.mul(G[:, :, :C], D, out=self.take("A", N, R, C, C))
        return self.A.view(N * R, C, C), P

    def residual(self, v: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """`beta (v - X_k)`, `[N*R, C, V]`, given v of that shape and beta `[N*R, C, 1]`."""
        N, R, _, V = self.raw.shape
        C = self.k.shape[1]
        beta = beta.view(N, R, C, 1)
        b = torch.mul(self.raw[:, :, :C], -beta * self.reading[..., None], out=self.take("b", N, R, C, V))
        return b.addcmul_(v.unflatten(0, (N, R)), beta).view(N * R, C, V)

    def output(self, within: torch.Tensor, o: torch.Tensor) -> None:
        """Write `X_q + within` to o `[n, HV, Q, V]`, given within `[n*HV, Q, V]`."""
        groups = (o.shape[0], -1)
        raw = self.raw[:, :, self.keys :].unflatten(0, groups)
        reading = self.reading[..., self.after, None].unflatten(0, groups)
        within = within.view(raw.shape)
        o = o.unflatten(1, raw.shape[1:3])
        if o.dtype == within.dtype:
            torch.addcmul(within, raw, reading, out=o)
        else:
            o.copy_(within.addcmul_(raw, reading))

    def read(self) -> torch.Tensor:
        """X `[N*R, C + Q, V]`: what k and q read from the state; `[N*R, Q, V]` without the delta rule."""
        N, R, rows, V = self.raw.shape
        reading = self.reading[..., self.after]
        self.row_reading = (torch.cat((self.reading, reading), dim=-1) if self.keys else reading)[..., None]
        self.X = torch.mul(self.raw, self.row_reading, out=self.take("X", N, R, rows, V))
        return self.X.view(N * R, rows, V)

    def write_(self, S: torch.Tensor, u: torch.Tensor) -> None:
        """Update the state in place with u `[N*R, C, V]`."""
        N, K, R, V = S.shape
        S.mul_(self.reading[:, None, :, -1:])
        S.view(N, K, R * V).baddbmm_(self.k.mT, self._weigh(u))

    def _weigh(self, u: torch.Tensor) -> torch.Tensor:
        """u times the decay that is left of it at the end of the chunk, heads of a group side by side."""
        N, R, C = self.writing.shape
        V = u.shape[-1]
        weighed = self.take("weighed", N, C, R, V)
        torch.mul(u.view(N, R, C, V), self.writing[..., None], out=weighed.transpose(1, 2))
        return weighed.view(N, C, R * V)

    def write_backward(self, dS: torch.Tensor) -> torch.Tensor:
        """The gradient of u `[N*R, C, V]`, given that of the new state."""
        N, K, R, V = dS.shape
        C = self.k.shape[1]
        du = torch.bmm(self.k, dS.view(N, K, R * V), out=self.take("K dS", N, C, R * V)).view(N, C, R, V)
        self.du = torch.mul(du.transpose(1, 2), self.writing[..., None], out=self.take("du", N, R, C, V))
        return self.du.view(N * R, C, V)

    def backward_(
        self,
        dA: torch.Tensor | None,
        dP: torch.Tensor,
        dX: torch.Tensor,
        dS: torch.Tensor,
        u: torch.Tensor,
        S: torch.Tensor,
    ) -> Gradients:
        """Gradients from those of A (strictly lower; None without the delta rule), P (anything where P is zero), X and
        the new state; dS becomes that of the old one, and dP may be written to.

        `attend_(S)`, `read()` and `write_backward(dS)` come first.
        """
        N, rows, K = self.readers.shape
        R, V = S.shape[2:]
        C = self.k.shape[1]
        dX, dP = dX.view(N, R, rows, V), dP.view(N, R, rows - self.keys, C)
        weighed = self._weigh(u)
        from_write = torch.bmm(weighed, dS.view(N, K, R * V).mT, out=self.take("u dS", N, C, K))

        # A log decay acts through every pair of tokens that it lies between: rows from its token on, columns before it.
        # Summed as pairs, not as row sums less column sums, whose large terms cancel when decays are strong.
        of_rows = torch.mul(dX, self.X, out=self.take("dX X", N, R, rows, V)).sum(-1)
        dG = (dP * self.D[:, :, self.after]).sum(1)
        if dA is None:
            pairs, through_read = dP * self.P, of_rows
        else:
            dA = dA.view(N, R, C, C)
            pairs = dA * self.A
            pairs[:, :, self.after].addcmul_(dP, self.P)
            through_read = of_rows[..., :C]
            through_read[..., self.after] += of_rows[..., C:]
            dG = torch.cat(((dA * self.D).sum(1), dG), dim=1)
        through = _sum_from(pairs, -2).tril_(-1).sum(-1)
        through_write = self.du.mul_(u.view(N, R, C, V)).sum(-1)
        through_state = torch.mul(S, dS, out=self.take("S dS", N, K, R, V)).sum((1, 3))
        dg = through + _sum_from(through_read, -1) + (self.reading[..., -1] * through_state)[..., None]
        dg[..., 1:] += through_write[..., :-1].cumsum(-1)

        raw = self.take("raw", N, rows, R, V)
        torch.mul(dX, self.row_reading, out=raw.transpose(1, 2))
        raw = raw.view(N, rows, R * V)
        dkq = torch.bmm(dG, self.k, out=self.take("dkq", N, rows, K))
        dkq.baddbmm_(raw, S.view(N, K, R * V).mT)
        dk = from_write.baddbmm_(dG.mT, self.readers)
        if self.keys:
            dkq[:, :C] += dk
        else:
            dkq = torch.cat((dk, dkq), dim=1)
        dS.mul_(self.reading[:, None, :, -1:])
        dS.view(N, K, R * V).baddbmm_(self.readers.mT, raw)
        return Gradients(dkq, dg, dS)


class _ChannelDecay:
    """What the ways of a decay per channel share: their states `[N*R, K, V]`, and X `[N*R, readers, C, V]` as it is
    read, with k and q for readers, or q alone without the delta rule."""

    take: Callable[..., torch.Tensor]
    X: torch.Tensor

    @staticmethod
    def load_state(state: torch.Tensor, heads: int) -> torch.Tensor:
        """`[B, HV, K, V]` to a new tensor in this class's layout."""
        return state.clone(memory_format=torch.contiguous_format).view(-1, *state.shape[2:])

    @staticmethod
    def store_state(S: torch.Tensor, batch: int) -> torch.Tensor:
        """The inverse of `load_state`, as a view."""
        return S.view(batch, -1, *S.shape[1:])

    def residual(self, v: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """As `ScalarDecay.residual`."""
        return torch.sub(v, self.X[:, 0], out=self.take("b", *self.X[:, 0].shape)).mul_(beta)

    def output(self, within: torch.Tensor, o: torch.Tensor) -> None:
        """As `ScalarDecay.output`."""
        torch.add(self.X[:, -1].unflatten(0, o.shape[:2]), within.unflatten(0, o.shape[:2]), out=o)

    def read(self) -> torch.Tensor:
        """As `ScalarDecay.read`."""
        return self.X.flatten(1, 2)


class ReferencedDecay(_ChannelDecay):
    """One decay per key channel and token (KDA), every exponent taken from the middle of the chunk.

    `D_ij = exp2(x_i) exp2(-x_j)` with x the log decay from the middle token: two factors that scale k and q once, so
    that scores, read and write are plain products. It needs every |x| within `REACH`: see `referenced_size`;
    `LevelDecay` does without.

    Args:
        kq: `[N, 2, C, K]`, k and the scaled q of N = batch * H heads.
        g: `[N, R, C, K]`, binary log decays.
        workspace: where results of its methods lie until the next chunk.
        delta: whether k reads the state too (the delta rule).
        b: `[N, R, C, K]`, the erase gate, or None for 1.

    States are `[N*R, K, V]`.
    """

    def __init__(
        self, kq: torch.Tensor, g: torch.Tensor, workspace: Workspace, delta: bool, b: torch.Tensor | None = None
    ) -> None:
        self.k, self.b, self.take = kq[:, None, 0], b, workspace.take
        self.readers = 2 if delta else 1
        N, R, C, K = self.shape = g.shape
        self.from_middle = workspace.constant("from middle", C, _from_middle)
        x = torch.bmm(
            self.from_middle.expand(N * R, C + 1, C), g.flatten(0, 1), out=self.take("x", N * R, C + 1, K)
        ).view(N, R, C + 1, K)
        self.up = torch.exp2(x[:, :, :C], out=self.take("up", N, R, C, K))
        self.down = torch.reciprocal(self.up, out=self.take("down", N, R, C, K))
        self.to_middle = exp2_(x[:, :, C].clone()).view(N * R, K, 1)
        self.to_end = self.up[:, :, -1].reshape(N * R, K, 1)
        reading = kq[:, None, -self.readers :]
        rows = torch.mul(reading, self.up[:, :, None], out=self.take("rows", N, R, self.readers, C, K))
        if b is not None:
            rows[:, :, 0].mul_(b)
        self.rows = rows.view(N * R, self.readers * C, K)
        self.cols = torch.mul(self.k, self.down, out=self.take("cols", N, R, C, K)).view(N * R, C, K)

    def attend_(self, S: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `ScalarDecay.attend_`."""
        M, rows, _ = self.rows.shape
        C, V = self.cols.shape[1], S.shape[-1]
        S.mul_(self.to_middle)
        self.X = torch.bmm(self.rows, S, out=self.take("X", M, rows, V)).view(M, -1, C, V)
        AP = torch.bmm(self.rows, self.cols.mT, out=self.take("AP", M, rows, C)).view(M, -1, C, C)
        return (AP[:, 0] if self.readers == 2 else None), AP[:, -1].tril_()

    def write_(self, S: torch.Tensor, u: torch.Tensor) -> None:
        """Update the state in place with u `[N*R, C, V]`."""
        S.baddbmm_(self.cols.mT, u).mul_(self.to_end)

    def write_backward(self, dS: torch.Tensor) -> torch.Tensor:
        """The gradient of u `[N*R, C, V]`, given that of the new state."""
        return torch.bmm(self.cols, torch.mul(dS, self.to_end, out=self.take("dS", *dS.shape)))

    def backward_(
        self,
        dA: torch.Tensor | None,
        dP: torch.Tensor,
        dX: torch.Tensor,
        dS: torch.Tensor,
        u: torch.Tensor,
        S: torch.Tensor,
    ) -> Gradients:
        """As `ScalarDecay.backward_`."""
        N, R, C, K = self.shape
        dG = dP.tril_() if dA is None else torch.cat((dA, dP.tril_()), dim=1)
        dS.mul_(self.to_end)
        from_write = torch.bmm(u, dS.mT, out=self.take("u dS", N * R, C, K))
        product = self.take("dS S", *S.shape)
        d_end = (from_write * self.cols).sum(1) + torch.mul(dS, S, out=product).sum(-1)
        drows = torch.bmm(dG, self.cols, out=self.take("drows", *self.rows.shape)).baddbmm_(dX, S.mT)
        dcols = from_write.baddbmm_(dG.mT, self.rows)
        dS.baddbmm_(self.rows.mT, dX)

        dx = (drows * self.rows).view(N * R, -1, C, K).sum(1)
        dx -= dcols * self.cols
        dx[:, -1] += d_end
        dx = torch.cat((dx, torch.mul(dS, S, out=product).sum(-1)[:, None]), dim=1)
        dg = torch.matmul(self.from_middle.mT, dx).view(N, R, C, K)

        per_head = drows.view(N, R, -1, C, K).mul_(self.up[:, :, None])
        db = None
        if self.b is not None:
            db = per_head[:, :, 0] * self.k
            per_head[:, :, 0].mul_(self.b)
        dkq = per_head.sum(1)
        dk = (dcols.view(N, R, C, K) * self.down).sum(1)
        if dA is None:
            dkq = torch.cat((dk[:, None], dkq), dim=1)
        else:
            dkq[:, 0] += dk
        return Gradients(dkq, dg, dS.mul_(self.to_middle), db)


class LevelDecay(_ChannelDecay):
    """One decay per key channel and token (KDA), for decays of any strength.

    The lower triangle of the scores is cut into squares that touch the diagonal with one corner: C/2 wide, twice C/4
    wide, four times C/8 wide, and so on. Within a square every exponent is taken from the token where its rows begin:
    `D_ij = exp2(after_i) exp2(before_j)`, both at most 1 for log decays at most 0, so that nothing can overflow however
    strong the decays are. Sums from one square to the next larger ones are built by adding, never by subtracting, so
    that they are as exact as a short sum of the decays themselves.

    The arguments are those of `ReferencedDecay`. States are `[N*R, K, V]`.
    """

    def __init__(
        self, kq: torch.Tensor, g: torch.Tensor, workspace: Workspace, delta: bool, b: torch.Tensor | None = None
    ) -> None:
        self.b, self.take = b, workspace.take
        N, R, C, K = g.shape
        readers = 2 if delta else 1
        self.shape = (N, R, C, K)
        padded = (1 << (C - 1).bit_length()) - C
        self.size = C + padded
        padded_kq = self.take("padded kq", N, R, 2, self.size, K)
        padded_kq[..., :C, :] = kq[:, None]
        after = self.take("after", N, R, self.size, K)
        after[:, :, :C] = g
        if padded:
            padded_kq[..., C:, :] = 0
            after[:, :, C:] = 0
        padded_kq = padded_kq.view(N * R, 2, self.size, K)
        self.k = padded_kq[:, 0]
        self.readers = padded_kq[:, -readers:]
        if b is not None:
            self.k = self.take("padded k", N * R, self.size, K).copy_(self.k)
            self.readers[:, 0, :C].mul_(b.flatten(0, 1))
        after = after.view(N * R, self.size, K)
        before = self.take("before", N * R, self.size, K).zero_()
        self.levels = []
        width = 1
        while width < self.size:
            self.levels.append(self._square(after, before, width))
            halves = (N * R, -1, 2, width, K)
            after_, before_ = after.view(halves), before.view(halves)
            first, second = after_[:, :, 0, -1:].clone(), after_[:, :, 1, -1:].clone()
            before_[:, :, 0] += second
            after_[:, :, 1] += first
            width *= 2
        self.reading, self.writing = exp2_(after), exp2_(before)
        self.total = self.reading[:, C - 1, :, None]
        rows = torch.mul(self.readers, self.reading[:, None], out=self.take("rows", N * R, readers, self.size, K))
        self.rows = rows.view(N * R, readers * self.size, K)
        self.cols = torch.mul(self.k, self.writing, out=self.take("cols", N * R, self.size, K))

    def _square(self, after: torch.Tensor, before: torch.Tensor, width: int) -> "_Square":
        """The factors of all squares of one width, from the log decays since and until their corner."""
        M, readers, S, K = self.readers.shape
        n = S // (2 * width)
        up = self.take(f"up{width}", M, n, width, K).copy_(after.view(M, n, 2, width, K)[:, :, 1])
        down = self.take(f"down{width}", M, n, width, K).copy_(before.view(M, n, 2, width, K)[:, :, 0])
        exp2_(up, NEGLIGIBLE_FACTOR), exp2_(down, NEGLIGIBLE_FACTOR)
        reading = self.readers.view(M, readers, n, 2, width, K)
        rows = self.take(f"rows{width}", M, n, readers, width, K)
        torch.mul(reading[:, :, :, 1].transpose(1, 2), up[:, :, None], out=rows)
        k = self.k.view(M, n, 2, width, K)
        cols = torch.mul(k[:, :, 0], down, out=self.take(f"cols{width}", M, n, width, K))
        return _Square(up, down, rows.view(M * n, readers * width, K), cols.view(M * n, width, K))

    def _squares_of(self, AP: torch.Tensor, width: int) -> torch.Tensor:
        """All squares of one width in `[M, readers, size, size]`, as a view `[M, readers, width, width, n]`."""
        M, readers, S, _ = AP.shape
        blocks = AP.view(M, readers, S // (2 * width), 2, width, S // (2 * width), 2, width)
        return blocks.diagonal(dim1=2, dim2=5)[:, :, 1, :, 0]

    def attend_(self, S: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """As `ScalarDecay.attend_`."""
        C = self.shape[2]
        M, readers, size, _ = self.readers.shape
        AP = self.take("AP", M, readers, size, size).zero_()
        own = torch.mul(self.k, self.readers[:, -1], out=self.take("own", *self.k.shape))
        AP[:, -1].diagonal(dim1=-2, dim2=-1).copy_(own.sum(-1))
        width = 1
        for level in self.levels:
            square = torch.bmm(level.rows, level.cols.mT).view(M, -1, readers, width, width)
            self._squares_of(AP, width).copy_(square.permute(0, 2, 3, 4, 1))
            width *= 2
        X = torch.bmm(self.rows, S, out=self.take("X", M, readers * size, S.shape[-1]))
        self.X = X.view(M, readers, size, -1)[:, :, :C]
        return (AP[:, 0, :C, :C] if readers == 2 else None), AP[:, -1, :C, :C]

    def write_(self, S: torch.Tensor, u: torch.Tensor) -> None:
        """Update the state in place with u `[N*R, C, V]`."""
        S.mul_(self.total).baddbmm_(self.cols[:, : u.shape[1]].mT, u)

    def write_backward(self, dS: torch.Tensor) -> torch.Tensor:
        """The gradient of u `[N*R, C, V]`, given that of the new state."""
        return torch.bmm(self.cols[:, : self.shape[2]], dS)

    def backward_(
        self,
        dA: torch.Tensor | None,
        dP: torch.Tensor,
        dX: torch.Tensor,
        dS: torch.Tensor,
        u: torch.Tensor,
        S: torch.Tensor,
    ) -> Gradients:
        """As `ScalarDecay.backward_`."""
        N, R, C, K = self.shape
        M, padded = N * R, self.size - C
        readers = self.readers.shape[1]
        dX = F.pad(dX.unflatten(1, (readers, C)), (0, 0, 0, padded)).reshape(M, readers * self.size, -1)
        scores = [dP.tril_()] if dA is None else [dA, dP.tril_()]
        dAP = F.pad(torch.stack(scores, dim=1), (0, padded, 0, padded))

        drows = torch.bmm(dX, S.mT)
        dcols = torch.bmm(F.pad(u, (0, 0, 0, padded)), dS.mT)
        d_after = (drows * self.rows).view(M, readers, -1, K).sum(1)
        d_after[:, C - 1] += self.total[..., 0] * (S * dS).sum(-1)
        d_before = dcols * self.cols
        d_readers = drows.view(M, readers, -1, K) * self.reading[:, None]
        reads_as_is = dA is not None and self.b is None
        dk = d_readers[:, 0] if reads_as_is else torch.zeros_like(self.k)
        dk += dcols.mul_(self.writing)
        diagonal = dP.diagonal(dim1=-2, dim2=-1)[..., None]
        dk[:, :C] += diagonal * self.readers[:, -1, :C]
        d_readers[:, -1, :C] += diagonal * self.k[:, :C]

        width = self.size // 2
        for level in reversed(self.levels):
            halves = (M, -1, 2, width, K)
            after_, before_ = d_after.view(halves), d_before.view(halves)
            readers_ = d_readers.view(M, readers, -1, 2, width, K)
            # The sums that grew from this level to the next one.
            after_[:, :, 0, -1] += after_[:, :, 1].sum(-2)
            after_[:, :, 1, -1] += before_[:, :, 0].sum(-2)
            square = self._squares_of(dAP, width).permute(0, 4, 1, 2, 3).reshape(-1, readers * width, width)
            drows = torch.bmm(square, level.cols)
            dcols = torch.bmm(square.mT, level.rows)
            after_[:, :, 1] += (drows * level.rows).view(M, -1, readers, width, K).sum(2)
            before_[:, :, 0] += (dcols * level.cols).view(M, -1, width, K)
            readers_[:, :, :, 1] += (drows.view(M, -1, readers, width, K) * level.up[:, :, None]).transpose(1, 2)
            dk.view(halves)[:, :, 0] += dcols.view(M, -1, width, K) * level.down
            width //= 2

        dS.mul_(self.total).baddbmm_(self.rows.mT, dX)
        db = None
        if self.b is not None:
            db = (d_readers[:, 0] * self.k)[:, :C].reshape(N, R, C, K)
            d_readers[:, 0, :C].mul_(self.b.flatten(0, 1)).add_(dk[:, :C])
        dkq = d_readers if dA is not None else torch.cat((dk[:, None], d_readers), dim=1)
        dkq = dkq[:, :, :C].reshape(N, R, 2, C, K).sum(1)
        return Gradients(dkq, d_after[:, :C].reshape(N, R, C, K), dS, db)


class _Square(NamedTuple):
    """The squares of one width: decays `[M, n, width, K]` and the scaled rows (k, if it reads, above q) and columns."""

    up: torch.Tensor
    down: torch.Tensor
    rows: torch.Tensor
    cols: torch.Tensor


def referenced_size(g: torch.Tensor) -> int:
    """The largest piece of a chunk for which `ReferencedDecay` is safe: all of it, a half, a quarter, or 0 for none.

    Half a piece, to either side of its middle, may decay by `REACH` at most. On devices other than CPUs the values are
    not looked at, which would stall the queue once per chunk.

    Args:
        g: `[N, R, C, K]`, binary log decays.
    """
    N, R, C, K = g.shape
    if g.device.type != "cpu":
        return 0
    halves = 8 if C in (16, 32, 64) else 2
    half = -(-C // halves)
    padded = F.pad(g, (0, 0, 0, halves * half - C)) if halves * half > C else g
    if padded.amax().item() > 0:  # outside the contract; the sum of decays is their total otherwise, without a copy
        padded = padded.abs()
    sums = padded.reshape(N * R, halves, half, K).sum(2).abs_()
    size, safe = 2 * half, 0
    while True:
        if not sums.amax().item() <= REACH:
            return safe
        safe = min(size, C)
        if safe == C:
            return C
        sums = sums[:, ::2] + sums[:, 1::2]
        size *= 2


def _sum_from(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums from each entry to the last one."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _from_middle(C: int, like: torch.Tensor) -> torch.Tensor:
    """`[C + 1, C]`: maps log decays to their sums from the middle token to each token; last row: up to the middle."""
    i, j = torch.arange(C, device=like.device)[:, None], torch.arange(C, device=like.device)
    middle = (C - 1) // 2
    forward = (j > middle) & (j <= i)
    backward = (j <= middle) & (j > i)
    return torch.cat((forward.to(like.dtype) - backward.to(like.dtype), (j <= middle).to(like.dtype)[None]))


def _above(C: int, like: torch.Tensor) -> torch.Tensor:
    """`[C, C]`: -inf above the diagonal, 0 elsewhere."""
    return like.new_full((C, C), float("-inf")).triu_(1)
