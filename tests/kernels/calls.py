"""Calls of the chunk kernel: made, run in guarded memory, and judged by the definition.

**How far a result may be off.** Let M be the largest `|S|_F + |v|` of any token of a sequence and head. A token maps
the state by a contraction (`|I - beta k k^T| <= 1` as `|k| <= 1` and `0 <= beta <= 2`; decays are at most 1), so that
errors of older chunks never grow and those of chunks add up. Within a chunk of C tokens, in float32 (`EPS` half a unit
in the last place of 1):

* Products over K and over C terms lose `sqrt(n) EPS` of the product of norms, as roundings of either sign do.
* The inverse of `I + A` is made of powers of A, whose elements may exceed those of the sum: it loses `growth EPS`.
* About 8 roundings by elementwise operations.
* Decays of channels: `exp` of a difference of float32 sums c, off by `EPS |c|` for each of the additions between them;
  these add up as a walk: 4 stands for 16 of them.

That is `EPS (growth + sqrt(K) + sqrt(C) + 8 + 4 |c|) M` per chunk, and o reads the state times `scale |q|`.

In `fast` mode a number is cast to 16 bits about 8 times between the state before a chunk and o or the state after it
(state as operand, what is read of it, R, T, u, u scaled, P or K, o), by `u = 2^-11` or, cut off, `2^-7` at most: the
bound is `(growth + 8) u M` more. For single rows that says little: M is made of K directions, of which q sees one. With
random q and k that is `M / sqrt(K)`, in the mean over a head.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import comb
from typing import Any, NamedTuple

import torch

from fla_npu.ops.common.configs import Config
from fla_npu.ops.common.gate import gate_forward
from fla_npu.ops.common.gate_kernel import FORGET
from fla_npu.ops.common.launch import launch_chunks
from fla_npu.ops.common.prepare import gate_parameters
from fla_npu.ops.common.reference import reference_forward
from fla_npu.ops.problem import Options, Problem, Tensors
from tests.kernels.memory import guarded_results, surrounded
from tests.kernels.rounding import ROUNDING

EPS = 2.0**-24
"""Half a unit in the last place of 1 in float32."""

GATES = ("mild", "none", "forgetful", "strong", "to -1000", "sudden", "softplus", "bounded", "steep softplus")
"""Log decays g, and logits of the two formulas. Sudden: single steps of -1000 and -inf among mild ones."""

BETAS = ("usual", "zero", "one", "two", "logits", "logits to two")


class Call(NamedTuple):
    tensors: Tensors
    options: Options
    bounds: list[int] | None
    """Of the sequences of a pack."""

    @property
    def sequences(self) -> list[tuple[slice, slice, slice]]:
        """Rows of the batch, tokens and rows of the states, of each group of sequences of one length."""
        if self.bounds is None:
            return [(slice(None), slice(None), slice(None))]
        return [(slice(None), slice(a, b), slice(n, n + 1)) for n, (a, b) in enumerate(pairwise(self.bounds))]

    @property
    def lengths(self) -> list[int]:
        """What the host may know of the sequences."""
        B, T = self.tensors.v.shape[:2]
        return [T] * B if self.bounds is None else [b - a for a, b in pairwise(self.bounds)]

    def alone(self, n: int) -> "Call":
        """Sequence n of the pack as a call of its own."""
        assert self.bounds is not None
        _, tokens, states = self.sequences[n]
        tensors = self.tensors.map_tokens(lambda x: x[:, tokens])
        if tensors.initial_state is not None:
            tensors = tensors._replace(initial_state=tensors.initial_state[states])
        return Call(tensors, self.options, None)


def bounds_of(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def log_decays(kind: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """`GATES` that no formula makes."""
    u = torch.rand(*shape, generator=generator)
    if kind == "none":
        return torch.zeros(*shape)
    if kind == "forgetful":
        return torch.nn.functional.logsigmoid(4 * u - 2)
    if kind == "strong":
        return -40 * u
    if kind == "to -1000":
        return -1000 * u**4
    mild = -0.1 * torch.rand(*shape, generator=generator)
    if kind == "sudden":
        return torch.where(u < 0.03, -1000.0, torch.where(u > 0.97, -torch.inf, torch.where(u > 0.9, -30.0, mild)))
    assert kind == "mild"
    return mild


def make_call(
    *,
    B: int = 1,
    T: int = 70,
    lengths: Sequence[int] | None = None,
    H: int = 1,
    HV: int = 2,
    K: int = 32,
    V: int = 32,
    channel: bool = False,
    dtype: torch.dtype = torch.float32,
    gate: str = "mild",
    lower_bound: float = -5.0,
    bias: bool = True,
    beta: str = "usual",
    l2norm: bool = False,
    initial: bool = True,
    final: bool = True,
    v_first: bool = False,
    fused: bool = False,
    scale: float | None = None,
    seed: int = 0,
) -> Call:
    """A random call. fused: q, k, v, beta and g are slices of one projection.

    Keys and queries are a little shorter than 1, so that they still are when rounded.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    bounds = None if lengths is None else bounds_of(lengths)
    B, T = (B, T) if bounds is None else (1, bounds[-1])
    N = B if lengths is None else len(lengths)
    q, k = normal(B, T, H, K), normal(B, T, H, K)
    if not l2norm:
        q, k = (0.98 * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v, b = normal(B, T, HV, V), normal(B, T, HV)
    if beta in ("zero", "one", "two"):
        b = torch.full_like(b, float(("zero", "one", "two").index(beta)))
    elif beta == "usual":
        b = b.sigmoid()
    shape = (B, T, HV, K) if channel else (B, T, HV)
    raw = gate in ("softplus", "bounded", "steep softplus")
    g = (10 if gate == "steep softplus" else 1) * normal(*shape) if raw else log_decays(gate, shape, generator)
    parts = [x.to(dtype) for x in (q, k, v, b)] + [g.to(dtype) if raw else g]
    if fused:
        widths = [x.shape[2:].numel() for x in parts]
        # Wide enough for rows that start at whole lines.
        row = torch.full((B, T, -(-sum(widths) // 16) * 16), torch.nan, dtype=dtype)
        for i, x in enumerate(parts):
            if x.dtype == dtype:
                at = sum(widths[:i])
                parts[i] = row[:, :, at : at + widths[i]].view(x.shape).copy_(x)
    q, k, v, b, g = parts
    formula = {"steep softplus": "softplus"}.get(gate, gate) if raw else "none"
    state = normal(N, HV, V, K) if v_first else normal(N, HV, K, V)
    options = Options(
        decay="channel" if channel else "scalar",
        scale=K**-0.5 if scale is None else scale,
        qk_l2norm=l2norm,
        gate=formula,
        lower_bound=lower_bound if formula == "bounded" else None,
        beta_sigmoid=beta.startswith("logits"),
        beta_scale=2.0 if beta == "logits to two" else 1.0,
        state_v_first=v_first,
        output_final_state=final,
    )
    A_log = 0.3 * normal(HV) if raw else None
    dt_bias = normal(HV * K if channel else HV) if raw and bias else None
    return Call(Tensors(q, k, v, g, b, A_log, dt_bias, state if initial else None), options, bounds)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal, NaN included, or both absent."""
    if a is None or b is None:
        return a is b
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


def run(call: Call, config: Config | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The kernel on copies between NaN, which it must leave as they are."""
    copies = Tensors(*map(surrounded, call.tensors))
    cu_seqlens = None if call.bounds is None else surrounded(torch.tensor(call.bounds))
    with guarded_results():
        o, final = launch_chunks(
            copies, call.options, config or Config(), cu_seqlens=cu_seqlens, **{"cores": 3, **arguments}
        )
    for copy, x in zip(copies, call.tensors, strict=True):
        assert same(x, copy)
    assert o.dtype == call.tensors.v.dtype and o.shape == call.tensors.v.shape and o.is_contiguous()
    assert (final is not None) == call.options.output_final_state
    return o, final


class Wanted(NamedTuple):
    """What the definition says, in float64."""

    o: torch.Tensor
    final: torch.Tensor
    largest: torch.Tensor
    """Largest `|S|_F + |v|` of any token, `[N, HV]`."""


def double(tensors: Tensors) -> Tensors:
    return Tensors(*(None if x is None else x.double() for x in tensors))


def definition(call: Call) -> Wanted:
    """The recurrence, one token at a time."""
    tensors = double(call.tensors)
    options = replace(call.options, output_final_state=True)
    B, T, HV, V = tensors.v.shape
    K = tensors.q.shape[3]
    N = B if call.bounds is None else len(call.bounds) - 1
    shape = (V, K) if options.state_v_first else (K, V)
    state = tensors.initial_state
    state = tensors.v.new_zeros(N, HV, *shape) if state is None else state.clone()
    o = torch.empty_like(tensors.v)
    largest = state.flatten(2).norm(dim=2)
    for rows, tokens, states in call.sequences:
        for t in range(*tokens.indices(T)):
            token = tensors._replace(initial_state=state[states]).map_tokens(lambda x, t=t: x[:, t : t + 1])
            o[rows, t : t + 1], state[states], _ = reference_forward(Problem(token, options, None))
            size = state[states].flatten(2).norm(dim=2) + tensors.v[rows, t].norm(dim=2)
            largest[states] = torch.maximum(largest[states], size)
    return Wanted(o, state, largest)


def growth(call: Call) -> float:
    """Largest element of the powers of A within blocks of 8 tokens, if all of A were its largest: `m^p C(6, p - 1)`,
    that is 20 for equal keys and beta 1."""
    beta = call.tensors.beta.double()
    beta = call.options.beta_scale * beta.sigmoid() if call.options.beta_sigmoid else beta
    k = call.tensors.k.double()
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt() if call.options.qk_l2norm else k
    steps = range(1, min(8, k.shape[1]))
    m = max(((k[:, d:] * k[:, :-d]).sum(-1).abs().max().item() for d in steps), default=0.0) * beta.max().item()
    return max(m**p * comb(6, p - 1) for p in range(1, 8))


def summed(call: Call, chunk: int) -> float:
    """Largest sum of log decays that a chunk may hold as one number, which is where digits are lost."""
    options, g = call.options, call.tensors.g
    if options.decay != "channel":
        return 0.0
    assert g is not None
    if options.gate != "none":
        g = gate_forward(g.double(), *gate_parameters(double(call.tensors), options), options.gate, options.lower_bound)
    # What decays more starts anew every 16 tokens.
    return min(16 * -FORGET, chunk * g.abs().max().item())


def per_chunk(call: Call, config: Config, fast: bool) -> float:
    """Error that a chunk adds, in units of M; see the module."""
    K = call.tensors.q.shape[3]
    powers = growth(call)
    exact = EPS * (powers + K**0.5 + config.chunk**0.5 + 8 + 4 * summed(call, config.chunk))
    return exact + ((powers + 8) * ROUNDING[call.tensors.q.dtype] if fast else 0.0)


def limits(call: Call, wanted: Wanted, config: Config, fast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of `|error|` of rows of o, `[B, T, HV]`, and of states (Frobenius), `[N, HV]`; see the module."""
    B, T, HV = call.tensors.beta.shape
    if T == 0:
        return torch.zeros(B, T, HV), torch.zeros_like(wanted.largest)
    added = per_chunk(call, config, fast)
    q = call.tensors.q.double()
    length = torch.ones(B, T, q.shape[2], dtype=torch.float64) if call.options.qk_l2norm else q.norm(dim=3)
    read = call.options.scale * length.repeat_interleave(HV // q.shape[2], 2)
    rows = ROUNDING[call.tensors.v.dtype] * wanted.o.norm(dim=3)
    states = torch.zeros_like(wanted.largest)
    for group, tokens, index in call.sequences:
        start, end, _ = tokens.indices(T)
        chunks = torch.arange(end - start) // config.chunk + 1
        rows[group, start:end] += added * chunks[None, :, None] * wanted.largest[index, None] * read[group, start:end]
        states[index] = added * -(-(end - start) // config.chunk) * wanted.largest[index]
    if call.tensors.v.dtype == torch.float16:
        # Below its smallest normal number float16 has steps of 2^-24.
        rows += 2.0**-25 * wanted.o.shape[3] ** 0.5
    return rows, states


def check(
    call: Call, config: Config | None = None, fast: bool = False, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the kernel and compare with the definition, row by row and state by state."""
    config = config or Config()
    o, final = run(call, config, fast=fast, **arguments)
    wanted = definition(call)
    rows, states = limits(call, wanted, config, fast)
    error = (o.double() - wanted.o).norm(dim=3)
    assert (error <= rows).all(), f"o off by {(error / rows).max():.3g} of its bound"
    if fast:
        # In the mean over what a head has of a sequence.
        typical = call.tensors.q.shape[3] ** -0.5
        own = ROUNDING[o.dtype] * wanted.o.norm(dim=3)
        for group, tokens, _ in call.sequences:
            error_of_head, bound = ((x[group, tokens]).norm(dim=1) for x in (error, own + typical * (rows - own)))
            assert (error_of_head <= bound).all(), f"o off by {(error_of_head / bound).max():.3g} of its bound"
    if final is not None:
        assert final.dtype == torch.float32 and final.shape == wanted.final.shape and final.is_contiguous()
        error = (final.double() - wanted.final).flatten(2).norm(dim=2)
        # A state that no token changed is handed through.
        assert (error <= states).all(), f"state off by {(error / states).max():.3g} of its bound"
    return o, final
