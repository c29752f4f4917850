"""What one call of an op is, after validation: the options that fix its mathematics and its tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Options:
    """Everything about a call that is not a tensor. Hashable, so that plans and kernels can be cached by it."""

    decay: str
    """`none` (DeltaNet), `scalar` (one log decay per value head, GDN) or `channel` (one per key channel, KDA)."""
    scale: float
    """Factor of q."""
    qk_l2norm: bool = False
    """Normalise q and k over K: `x / sqrt(sum x^2 + 1e-6)`."""
    gate: str = "none"
    """`none` (g is a log decay), `softplus` (`-exp(A_log) softplus(g + dt_bias)`) or
    `bounded` (`lower_bound sigmoid(exp(A_log) (g + dt_bias))`)."""
    lower_bound: float | None = None
    beta_sigmoid: bool = False
    """beta is a logit."""
    beta_scale: float = 1.0
    """Factor of the sigmoid: 2 with `allow_neg_eigval`."""
    state_v_first: bool = False
    """States are `[N, HV, V, K]` instead of `[N, HV, K, V]`."""
    output_final_state: bool = False
    chunk_size: int = 64
    return_intermediate_states: bool = False
    """Also return the state at the start of every chunk."""
    keep_states: bool = False
    """Keep the chunk states for the backward pass instead of recomputing them (`disable_recompute`)."""
    updates: int = 1
    """Of the state per token, after its decay and before its output (`num_householder` of Gated DeltaProduct)."""


class Tensors(NamedTuple):
    """The tensors of a call. Shapes: q, k `[B,T,H,K]`, v `[B,T,HV,V]`, g `[B,T,HV]` or `[B,T,HV,K]`,
    beta `[B,T,HV]` (recurrent ops: or `[B,T,HV,V]`), A_log `[HV]`, dt_bias `[HV]` or `[HV*K]`,
    initial_state `[N,HV,K,V]` (or V-first). `gk` `[B,T,HV,K]` and `gv` `[B,T,HV,V]` are log decays on top of `g`,
    which only recurrent ops have; `b` `[B,T,HV,K]` and `w` `[B,T,HV,V]` the gates of GDN-2. With `Options.updates`, k,
    v and beta have that many rows per token. Without beta there is no delta rule: v is written as it is."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    gk: torch.Tensor | None = None
    gv: torch.Tensor | None = None
    b: torch.Tensor | None = None
    w: torch.Tensor | None = None

    def map_tokens(self, f: Callable[[torch.Tensor], torch.Tensor]) -> "Tensors":
        """The call with `f` applied to every tensor that has the dimensions B and T."""
        q, k, v, g, beta, A_log, dt_bias, state, gk, gv, b, w = self
        g, beta, gk, gv, b, w = (None if x is None else f(x) for x in (g, beta, gk, gv, b, w))
        return Tensors(f(q), f(k), f(v), g, beta, A_log, dt_bias, state, gk, gv, b, w)

    @property
    def step_size(self) -> torch.Tensor:
        """beta, of a call with the delta rule."""
        if self.beta is None:
            raise TypeError("without the delta rule there is no beta")
        return self.beta


class Bounds(Sequence[int]):
    """The bounds `0, ..., T` of packed sequences: a tensor, and its values on the host from when they are first asked
    for. Asking waits for the device that the tensor is on, so only who needs the values does.

    Args:
        tensor: `cu_seqlens` of the call.
        read: gives its values, checked.
    """

    __slots__ = ("_read", "_values", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor, read: Callable[[], tuple[int, ...]]) -> None:
        self.tensor = tensor
        self._read = read
        self._values: tuple[int, ...] | None = None
        self._version = None if tensor.is_inference() else tensor._version

    @property
    def known(self) -> bool:
        """Whether the values are on the host already."""
        return self._values is not None

    def values(self) -> tuple[int, ...]:
        """The values.

        Raises:
            ValueError: they are no bounds of the call's tokens; or, when they are read late, as a backward pass may,
                they are no longer those of the call.
        """
        if self._values is None:
            if self._version is not None and self.tensor._version != self._version:
                raise ValueError(
                    "cu_seqlens must keep its values until the backward pass has read them, got a tensor written to "
                    "since the call: pass cu_seqlens_cpu too, or a copy"
                )
            self._values = self._read()
        return self._values

    def __getitem__(self, i: Any) -> Any:
        return self.values()[i]

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[int]:
        return iter(self.values())


class Problem(NamedTuple):
    """A validated call. `cu_seqlens` holds the sequence bounds `0, ..., T` as integers, a `Bounds` if the call came
    through `checks.py`, or is None for a batch of equally long sequences."""

    tensors: Tensors
    options: Options
    cu_seqlens: Sequence[int] | None

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each of the N sequences."""
        if self.cu_seqlens is None:
            batch, length = self.tensors.q.shape[:2]
            return [length] * batch
        return [b - a for a, b in pairwise(self.cu_seqlens)]
