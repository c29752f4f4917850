"""Whole calls of the chunked ops with one configuration, against the recurrence in float64: what the compiled programs
compute in the simulator, or a device. A program that compiles may still hang or be wrong; imports triton."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fla_npu.compiler.simulator.launcher import SimulatedKernel
from fla_npu.ops.common import gate_kernel, launch
from fla_npu.ops.common.configs import Config
from fla_npu.ops.common.reference import reference_forward
from fla_npu.ops.problem import Options, Problem, Tensors
from fla_npu.testing import nmse

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
"""Largest relative error of rounding to a dtype."""


class Trial(NamedTuple):
    """Errors of a call as NMSE, and what they may be."""

    o: float
    state: float
    o_bound: float
    state_bound: float

    @property
    def right(self) -> bool:
        """False with NaN in either error as well."""
        return self.o <= self.o_bound and self.state <= self.state_bound


def bounds(dtype: str, fast: bool) -> tuple[float, float]:
    """NMSE that o and the final state may have.

    Exact: the rounding of o alone is at most `UNIT^2`; as much again for what is rounded before. The state is the
    paper's 9.38e-12, which float32 arithmetic keeps. Fast: what enters a product is rounded. Roundings are independent,
    so their NMSEs add: at most `UNIT^2` each for the state, the gates, the scores, the inverse, the right-hand side, u,
    u with its decays, and o. A wrong program gives 1e-3 and more.
    """
    unit = UNIT[dtype]
    if dtype == "fp32":
        return 9.38e-12, 9.38e-12
    return (8 * unit**2, 8 * unit**2) if fast else (2 * unit**2, 9.38e-12)


def make_call(
    op: str,
    *,
    K: int,
    V: int,
    dtype: str,
    tokens: int,
    heads: int = 1,
    lower_bound: float | None = -5.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Tensors, Options]:
    """A call with an initial state and normalised keys; gates of KDA are bounded unless `lower_bound` is None."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    channel = op == "chunk_kda"
    bounded = channel and lower_bound is not None
    gate = randn(1, tokens, heads, *([K] if channel else []))
    tensors = Tensors(
        q=F.normalize(randn(1, tokens, heads, K), dim=-1).to(DTYPES[dtype]),
        k=F.normalize(randn(1, tokens, heads, K), dim=-1).to(DTYPES[dtype]),
        v=randn(1, tokens, heads, V).to(DTYPES[dtype]),
        g=gate if bounded else -0.1 * gate.abs(),
        beta=torch.sigmoid(randn(1, tokens, heads)),
        A_log=0.3 * randn(heads) if bounded else None,
        dt_bias=randn(heads * K) if bounded else None,
        initial_state=randn(1, heads, K, V),
    )
    options = Options(
        decay="channel" if channel else "scalar",
        scale=K**-0.5,
        gate="bounded" if bounded else "none",
        lower_bound=lower_bound if bounded else None,
        output_final_state=True,
    )
    return _map(tensors, lambda x: x.to(device)), options


def _map(tensors: Tensors, f: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return Tensors._make(None if x is None else f(x) for x in tensors)


def expected(tensors: Tensors, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final state by the recurrence, in float64 on the CPU."""
    wide = _map(tensors, lambda x: x.cpu().double())
    o, state, _ = reference_forward(Problem(wide, options, None))
    assert state is not None
    return o, state


def judge(got: tuple[torch.Tensor, Any], right: tuple[torch.Tensor, torch.Tensor], dtype: str, fast: bool) -> Trial:
    """The errors of a result, wherever it lies."""
    return Trial(nmse(got[0].cpu(), right[0]), nmse(got[1].cpu(), right[1]), *bounds(dtype, fast))


class Simulation:
    """The launches of `launch_chunks`, compiled for a chip and run in the simulator on CPU tensors."""

    def __init__(self, chip: str = "910B3", schedule: str = "round_robin") -> None:
        self._owners = [(launch, "delta_rule_kernel")]
        self._owners += [(gate_kernel, name) for name in vars(gate_kernel) if name.endswith("_kernel")]
        self._kernels = [
            SimulatedKernel.of(getattr(owner, name), chip=chip, schedule=schedule) for owner, name in self._owners
        ]

    def close(self) -> None:
        for kernel in self._kernels:
            kernel.close()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The simulated kernels in the place of the real ones."""
        before = [getattr(owner, name) for owner, name in self._owners]
        for (owner, name), kernel in zip(self._owners, self._kernels, strict=True):
            setattr(owner, name, kernel)
        try:
            yield
        finally:
            for (owner, name), kernel in zip(self._owners, before, strict=True):
                setattr(owner, name, kernel)

    def trial(
        self,
        op: str,
        config: Config,
        *,
        K: int = 128,
        V: int = 128,
        dtype: str = "bf16",
        fast: bool = False,
        lower_bound: float | None = -5.0,
    ) -> Trial:
        """A short call: two chunks and a tail. With tiles, on so few cores that one head is whole and one in tiles.

        Raises:
            SimulationError, HazardError: the program hangs, reads what nobody wrote, or races.
            ValueError: it does not compile.
        """
        parts = max(1, config.fit(V).width // config.tile) if config.fit(V).tile else 1
        heads = 1 if parts == 1 else parts + 1
        tokens = 2 * config.chunk + config.chunk // 2 + 1
        tensors, options = make_call(op, K=K, V=V, dtype=dtype, tokens=tokens, heads=heads, lower_bound=lower_bound)
        with self.installed():
            got = launch.launch_chunks(tensors, options, config, fast=fast, cores=parts)
        return judge(got, expected(tensors, options), dtype, fast)
