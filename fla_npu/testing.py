"""Error measures, inputs and the float64 reference that tests and benchmarks share."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fla_npu.ops.common.recurrence import delta_recurrence, packed_delta_recurrence


def nmse(x: torch.Tensor, reference: torch.Tensor) -> float:
    """`sum (x - ref)^2 / sum ref^2` in float64: the measure of the HA-NPU paper. 0 when both are all zero or empty."""
    error = (x.double() - reference.double()).square().sum().item()
    power = reference.double().square().sum().item()
    return error / power if power else (0.0 if error == 0 else float("inf"))


def rms_ratio(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the error over that of the reference: FLA's measure, the square root of `nmse`."""
    return nmse(x, reference) ** 0.5


class Inputs(NamedTuple):
    """Tensors of a call: q, k `[B,T,H,K]`, v `[B,T,HV,V]`, g `[B,T,HV]` or `[B,T,HV,K]`, beta `[B,T,HV]`,
    initial_state `[N,HV,K,V]`. q, k, v and beta have the dtype asked for, g and the state are float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor


CASES = (
    "ordinary",
    "equal keys",
    "strong decay",
    "sudden decay",
    "no decay",
    "zero rows",
    "beta to two",
    "time fastest",
    "huge values",
    "tiny values",
)
"""What `make_inputs` can make. All but the first have broken an implementation of these ops somewhere."""


def make_inputs(
    case: str = "ordinary",
    *,
    B: int = 1,
    T: int = 64,
    H: int = 2,
    HV: int = 4,
    K: int = 16,
    V: int = 16,
    channel: bool = False,
    sequences: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """Random inputs of one of the `CASES`, the same for the same arguments. q and k have unit norm.

    * equal keys: repeated tokens, padding or silence; an inverse by powers of A overflows here.
    * strong decay: g down to -20 per step, as freshly initialised models have; exp(-cumsum(g)) overflows.
    * sudden decay: single steps of -1000 and -inf; differences of cumulative sums lose digits or are NaN.
    * zero rows: tokens whose q, k and v are 0, as padding arrives; a norm without epsilon is NaN.
    * beta to two: negative eigenvalues. time fastest: strided views as transformers passes them.
    * huge values, tiny values: v and the state scaled by 1e3 and 1e-3, within what float16 holds.

    Args:
        channel: a decay per key channel (KDA) instead of per head (GDN).
        sequences: rows of the initial state where they are not B, for packed calls.
    """
    if case not in CASES:
        raise ValueError(f"case must be one of {', '.join(CASES)}, got {case!r}")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    gates = (B, T, HV, K) if channel else (B, T, HV)
    q = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
    k = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
    v = normal(B, T, HV, V)
    g = torch.nn.functional.logsigmoid(normal(*gates) + 2)
    beta = normal(B, T, HV).sigmoid()
    state = normal(B if sequences is None else sequences, HV, K, V)

    if case == "equal keys":
        k = k[:, :1].expand_as(k).clone()
        g, beta = torch.full(gates, -1e-3), torch.full_like(beta, 0.99)
    elif case == "strong decay":
        g = -20 * uniform(*gates)
    elif case == "sudden decay":
        kind = uniform(*gates)
        g = torch.where(kind < 0.05, -1000.0, torch.where(kind > 0.95, -torch.inf, g))
    elif case == "no decay":
        g = torch.zeros(gates)
    elif case == "zero rows":
        empty = uniform(B, T, 1, 1) < 0.3
        q, k, v = (torch.where(empty, 0.0, x) for x in (q, k, v))
    elif case == "beta to two":
        beta = 2 * beta
    elif case == "huge values":
        v, state = 1e3 * v, 1e3 * state
    elif case == "tiny values":
        v, state = 1e-3 * v, 1e-3 * state
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    if case == "time fastest":
        q, k, v = (x.movedim(1, -1).contiguous().movedim(-1, 1) for x in (q, k, v))
    return Inputs(q, k, v, g, beta, state)


def reference(
    inputs: Inputs,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state of `inputs` by the token loop in float64; differentiable.

    Args:
        l2norm: normalise q and k as `use_qk_l2norm_in_kernel` does.
        cu_seqlens: bounds of packed sequences.
    """
    q, k = inputs.q.double(), inputs.k.double()
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    per_channel = inputs.g.ndim == 4
    g, gk = (None, inputs.g) if per_channel else (inputs.g, None)
    if cu_seqlens is None:
        return delta_recurrence(
            q,
            k,
            inputs.v,
            beta=inputs.beta,
            g=g,
            gk=gk,
            scale=scale,
            initial_state=inputs.initial_state,
            dtype=torch.float64,
        )
    return packed_delta_recurrence(
        q,
        k,
        inputs.v,
        cu_seqlens=cu_seqlens,
        beta=inputs.beta,
        g=g,
        gk=gk,
        scale=scale,
        initial_state=inputs.initial_state,
        dtype=torch.float64,
    )
