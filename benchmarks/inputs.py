"""Inputs of a case, and the fp64 token recurrence that every implementation must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from benchmarks.registry import DTYPES, Case

L2NORM_EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """q, k `[B,T,H,D]`, v and do `[B,T,HV,D]`, beta `[B,T,HV]` in the case's dtype; g `[B,T,HV]` (GDN) or `[B,T,HV,D]`
    (KDA), state and dstate `[B,HV,D,D]` in fp32. do and dstate are the gradients that a backward pass starts from."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    state: torch.Tensor
    do: torch.Tensor | None = None
    dstate: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What every implementation takes and what gradients are for: q, k, v, g, beta, state."""
        return self.q, self.k, self.v, self.g, self.beta, self.state

    @cached_property
    def normalised(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k as `normalise` returns them. Kept, because several peers share them and they are large."""
        return normalise(self.q, self.k, self.v.shape[2])


def make(case: Case, seed: int = 0) -> Inputs:
    """Gates as a trained model has them: a decay of a few per cent to a half per token, beta around one half."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    B, T, H, HV, D = case.B, case.T, case.H, case.HV, case.D
    dtype = DTYPES[case.dtype]
    backward = case.mode == "forward+backward"
    gate = (B, T, HV, D) if case.op == "kda" else (B, T, HV)
    return Inputs(
        q=normal(B, T, H, D).to(dtype),
        k=normal(B, T, H, D).to(dtype),
        v=normal(B, T, HV, D).to(dtype),
        g=F.softplus(normal(*gate).sub_(2.0)).neg_(),
        beta=normal(B, T, HV).sigmoid_().to(dtype),
        state=normal(B, HV, D, D),
        do=normal(B, T, HV, D).to(dtype) if backward else None,
        dstate=normal(B, HV, D, D) if backward else None,
    )


def normalise(q: torch.Tensor, k: torch.Tensor, HV: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k in fp32 with unit norm and HV heads, for the peers that neither normalise nor group."""
    return tuple(_unit(x.float()).repeat_interleave(HV // x.shape[2], dim=2) for x in (q, k))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + L2NORM_EPS).sqrt()


def recurrence(inputs: Inputs, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state by the definition of the op, token by token, in the inputs' dtype. Differentiable."""
    group = case.HV // case.H
    q, k = (_unit(x).repeat_interleave(group, dim=2) for x in (inputs.q, inputs.k))
    decay = inputs.g.exp()
    decay = decay[..., None] if case.op == "kda" else decay[..., None, None]
    state, outputs = inputs.state, []
    for t in range(case.T):
        state = state * decay[:, t]
        erased = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        update = inputs.beta[:, t, :, None] * (inputs.v[:, t] - erased)
        state = state + k[:, t, :, :, None] * update[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * case.D**-0.5)
    return torch.stack(outputs, dim=1), state
