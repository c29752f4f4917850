"""What is measured: the ops, the implementations that compute them, and the shapes. Records only, nothing is imported
from a peer here, so the registry loads on a machine that has none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

OPS = ("gdn", "kda")
MODES = ("forward", "forward+backward", "decode")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHUNK = 64
OURS = "fla_npu"


class PeerMissing(Exception):
    """The package of a peer is not installed, or its version lacks the op."""


@dataclass(frozen=True)
class Case:
    """One shape of one op in one mode: q, k `[B,T,H,D]`, v `[B,T,HV,D]`, state `[B,HV,D,D]` in fp32."""

    op: str
    mode: str
    B: int = 1
    T: int = 4096
    H: int = 16
    HV: int = 16
    D: int = 128
    dtype: str = "fp32"

    @property
    def key(self) -> str:
        heads = f"H{self.H}" if self.H == self.HV else f"H{self.H}-HV{self.HV}"
        return f"{self.op} {self.mode} B{self.B} T{self.T} {heads} D{self.D} {self.dtype}"

    @property
    def elements(self) -> int:
        """Size of v: what the memory of every implementation grows with."""
        return self.B * self.T * self.HV * self.D

    @property
    def work(self) -> int:
        """What the time of every implementation grows with, at least roughly: state elements times tokens."""
        return self.elements * self.D

    def record(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Implementation:
    """Something that computes an op. `target` is `module:function`; the function takes a case and its inputs and
    returns a call without arguments, so that conversions of layout or dtype stay outside the measurement."""

    name: str
    label: str
    target: str
    package: str | None
    ops: tuple[str, ...] = OPS
    modes: tuple[str, ...] = MODES
    checked: bool = True
    """Its result is the op's, so the gate compares it (the GEMM row computes nothing)."""
    memory_row: bool = True
    """Its peak memory is measured along T."""

    def supports(self, case: Case) -> bool:
        return case.op in self.ops and case.mode in self.modes

    def load(self) -> Callable:
        module, function = self.target.split(":")
        try:
            return getattr(importlib.import_module(module), function)
        except ImportError as error:
            raise PeerMissing(f"{self.package}: {error}") from error


PREFILL = ("forward", "forward+backward")

# Order is the order of the tables and legends.
IMPLEMENTATIONS = (
    Implementation(OURS, "fla_npu", "benchmarks.peers.ours:prepare", "fla-npu"),
    Implementation("hf_chunk", "transformers, chunked", "benchmarks.peers.hf:chunk", "transformers", modes=PREFILL),
    Implementation("hf_recurrent", "transformers, token loop", "benchmarks.peers.hf:recurrent", "transformers"),
    Implementation("fla_naive_chunk", "FLA naive, chunked", "benchmarks.peers.fla:chunk", "fla-core", modes=PREFILL),
    Implementation(
        "fla_naive_recurrent",
        "FLA naive, token loop",
        "benchmarks.peers.fla:recurrent",
        "fla-core",
        memory_row=False,
    ),
    Implementation(
        "ggml", "ggml GATED_DELTA_NET", "benchmarks.peers.ggml:prepare", "ggml-python", modes=("forward", "decode")
    ),
    Implementation(
        "gemm",
        "GEMMs of the same size",
        "benchmarks.peers.gemm:prepare",
        None,
        modes=PREFILL,
        checked=False,
        memory_row=False,
    ),
)
BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}

# Token loops in Python take minutes over the long cases; away from the series along T they would only repeat what it
# shows about them.
SERIES_ONLY = ("hf_recurrent", "fla_naive_recurrent")


def chunk_macs(K: int, V: int, C: int = CHUNK) -> int:
    """Multiply-accumulates of the chunked algorithm for one chunk of one value head: the state read by q and w
    (`[2C,K] x [K,V]`), the scores of q and k (`[2C,K] x [K,C]`), the solve and the read of the new values
    (`C C V` each) and the state update (`C K V`)."""
    return 2 * C * K * V + 2 * C * K * C + 2 * C * C * V + C * K * V


def case_macs(case: Case) -> int:
    """Multiply-accumulates of the chunked algorithm; a backward pass is two products for each of the forward's."""
    forward = case.B * case.HV * -(-case.T // CHUNK) * chunk_macs(case.D, case.D)
    return 3 * forward if case.mode == "forward+backward" else forward


def _star(op: str, mode: str, lengths: tuple[int, ...], arms: tuple[dict, ...]) -> list[Case]:
    """A series along T and one case per arm, all through the same centre."""
    return [Case(op, mode, T=T) for T in lengths] + [Case(op, mode, **arm) for arm in arms]


_ARMS = ({"H": 32, "HV": 32}, {"H": 48, "HV": 48}, {"D": 64}, {"B": 4}, {"dtype": "bf16"})
# Qwen3-Next and Qwen3.5 run GDN with 16 key and 32 value heads in bf16.
_QWEN = {"H": 16, "HV": 32, "dtype": "bf16"}


def _quick() -> list[Case]:
    small = {"H": 4, "HV": 4, "D": 64}
    return [
        Case(op, mode, T=T, **small)
        for op in OPS
        for mode, lengths in (("forward", (256, 512)), ("forward+backward", (128,)), ("decode", (1,)))
        for T in lengths
    ]


def _default() -> list[Case]:
    cases = []
    for op in OPS:
        extra = (_QWEN,) if op == "gdn" else ()
        cases += _star(op, "forward", (512, 1024, 4096, 16384, 65536), _ARMS + extra)
        cases += _star(op, "forward+backward", (512, 1024, 4096, 16384), ({"dtype": "bf16"},))
        cases += _star(op, "decode", (1,), tuple(dict(T=1, **arm) for arm in _ARMS + extra))
    return cases


def _full() -> list[Case]:
    """Everything of the default grid, with the arms crossed with the length and the dtype."""
    cases = _default()
    for op in OPS:
        for T in (512, 1024, 4096, 16384):
            for arm in (*_ARMS[:4], *(({"H": 16, "HV": 32}, {"H": 16, "HV": 48}) if op == "gdn" else ())):
                for dtype in DTYPES:
                    cases.append(Case(op, "forward", T=T, dtype=dtype, **arm))
                    if T <= 4096:
                        cases.append(Case(op, "forward+backward", T=T, dtype=dtype, **arm))
        for arm in _ARMS[:4]:
            cases.append(Case(op, "decode", T=1, dtype="bf16", **arm))
    return cases


GRIDS: dict[str, Callable[[], list[Case]]] = {"quick": _quick, "default": _default, "full": _full}


def cases(grid: str) -> list[Case]:
    """The cases of a grid without repeats, the smaller ones of an op and mode first: they predict the larger."""
    unique = dict.fromkeys(GRIDS[grid]())
    return sorted(unique, key=lambda case: (OPS.index(case.op), MODES.index(case.mode), case.work))


def implementations(case: Case, names: tuple[str, ...] = ()) -> list[Implementation]:
    """The implementations measured in a case. `names` picks among them and then also brings back the token loops."""
    everyone = case == Case(case.op, case.mode, T=case.T) or case.T < 4096
    chosen = []
    for implementation in IMPLEMENTATIONS:
        wanted = implementation.name in names if names else everyone or implementation.name not in SERIES_ONLY
        if wanted and implementation.supports(case):
            chosen.append(implementation)
    return chosen


def memory_cases(grid: str, mode: str = "forward") -> list[Case]:
    """The memory series: along T at the centre."""
    lengths = {
        "quick": (256, 1024),
        "default": (1024, 4096, 16384, 65536),
        "full": (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    }
    return [Case(op, mode, T=T) for op in OPS for T in lengths[grid]]
