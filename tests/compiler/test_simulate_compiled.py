"""Small kernels through the front end, the vendor's compiler and the simulator, against numpy."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fla_npu.compiler import KernelBuild, compile_build
from fla_npu.compiler.lower import Lowerer
from fla_npu.compiler.simulate import HazardError, SimulationError, simulate
from fla_npu.compiler.simulator.launcher import SimulatedKernel
from fla_npu.compiler.simulator.memory import bf16_bits, bf16_values
from tests.compiler import simulated_kernels

FILE = str(Path(simulated_kernels.__file__))
SCHEDULES = ["round_robin", "aic_first", "aiv_first", "random:0", "random:1"]
UNIT = 2.0**-24
"""Half a step of fp32 at 1. A sum of n products of numbers a, b is off by at most `n UNIT sum |a b|` in any order."""
ENCODE = {"fp32": lambda x: x, "fp16": lambda x: x.astype(np.float16), "bf16": bf16_bits}
DECODE = {"fp32": lambda x: x, "fp16": lambda x: x.astype(np.float32), "bf16": bf16_values}


@pytest.fixture(scope="module")
def lowerer():
    with Lowerer() as worker:
        yield worker


@pytest.fixture(scope="module", autouse=True)
def cache_directory(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLA_NPU_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def compiled(lowerer, kernel, signature, constants, options=None):
    build = KernelBuild(f"simulated-{kernel}", f"{FILE}:{kernel}", signature, constants, options or {})
    return compile_build(build, lowerer=lowerer).outcome.module


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"set_workspace_multibuffer": 1}, {"unit_flag": True}, {"multibuffer": False}])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_scores(lowerer, kind, options):
    """Products, with and without the pipeline over four workspace slots, for every order of the cores."""
    n, C, K = 5, 64, 128
    text = compiled(
        lowerer, "scores", {"q": f"*{kind}", "k": f"*{kind}", "o": "*fp32", "n": "i32"}, {"C": C, "K": K}, options
    )
    q, k = ENCODE[kind](numbers(n, C, K)), ENCODE[kind](numbers(n, C, K, seed=1))
    a, b = DECODE[kind](q).astype(np.float64), DECODE[kind](k).astype(np.float64)
    exact, size = 2 * a @ b.transpose(0, 2, 1), 2 * np.abs(a) @ np.abs(b).transpose(0, 2, 1)
    for schedule in SCHEDULES:
        o = np.zeros((n, C, C), np.float32)
        simulate(text, [q, k, o, n], 2, schedule)
        assert (np.abs(o - exact) <= K * UNIT * size).all()


@pytest.mark.parametrize("n", [150, 64, 7])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_a_short_last_block(lowerer, kind, n):
    C = K = 64
    text = compiled(lowerer, "tail", {"x": "*fp32", "y": "*fp32", "o": f"*{kind}", "n": "i32"}, {"C": C, "K": K})
    x, y = numbers(n, K), numbers(C, K, seed=1)
    o = ENCODE[kind](np.zeros((n, C), np.float32))
    simulate(text, [x, y, o, n], 2)
    x = x.astype(np.float64)
    a, b = x / (1 + np.exp(-x)), y.astype(np.float64)
    # The activation is off by a few UNIT, relatively; the result is rounded to its type once.
    step = {"fp32": UNIT, "fp16": 2.0**-11, "bf16": 2.0**-8}[kind]
    assert (
        np.abs(DECODE[kind](o) - a @ b.T) <= step * np.abs(a @ b.T) + (K + 8) * UNIT * np.abs(a) @ np.abs(b).T
    ).all()


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_vector_code(lowerer, kind):
    n, C, K = 3, 32, 64
    signature = {"x": f"*{kind}", "o": "*fp32", "sums": "*fp32", "tops": "*fp32", "n": "i32"}
    text = compiled(lowerer, "vectors", signature, {"C": C, "K": K})
    x = ENCODE[kind](numbers(n, C, K))
    o, sums, tops = np.zeros((n, C, K), np.float32), np.zeros((n, K), np.float32), np.zeros((n, C), np.float32)
    simulate(text, [x, o, sums, tops, n], 2)
    a = DECODE[kind](x).astype(np.float64)
    size = C * UNIT * np.abs(a).sum(1)
    assert (np.abs(sums - a.sum(1)) <= size).all()
    assert np.array_equal(tops, a.max(2))
    kept = np.where(np.arange(C)[:, None] >= np.arange(K), a.cumsum(1), -1)
    assert (np.abs(o - kept) <= size[:, None]).all()


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_a_state_that_goes_from_core_to_core(lowerer, kind):
    n, C, K = 3, 64, 128
    text = compiled(lowerer, "state", {"k": f"*{kind}", "v": f"*{kind}", "o": "*fp32", "n": "i32"}, {"C": C, "K": K})
    k, v = ENCODE[kind](numbers(n, C, K) / 16), ENCODE[kind](numbers(n, C, K, seed=1))
    a, b = DECODE[kind](k).astype(np.float64), DECODE[kind](v).astype(np.float64)
    state, size, exact, bound = np.zeros((K, K)), np.zeros((K, K)), [], []
    for t in range(n):
        exact.append(a[t] @ state)
        bound.append(np.abs(a[t]) @ size)
        state, size = state / 2 + a[t].T @ b[t], size / 2 + np.abs(a[t]).T @ np.abs(b[t])
    # Per step C additions to the state and K to the result; the state is read in the type of the inputs.
    relative = n * (C + K) * UNIT + (2.0**-11 if kind == "fp16" else 0)
    for schedule in SCHEDULES:
        o = np.zeros((n, C, K), np.float32)
        simulate(text, [k, v, o, n], 1, schedule)
        assert (np.abs(o - exact) <= relative * np.array(bound)).all()


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_transposition(lowerer, kind):
    x = ENCODE[kind](numbers(32, 64))
    o = np.zeros((64, 32), x.dtype)
    simulate(compiled(lowerer, "turned", {"x": f"*{kind}", "o": f"*{kind}"}, {"C": 32, "K": 64}), [x, o], 1)
    assert np.array_equal(o, x.T)


@pytest.mark.parametrize("n", [64, 37, 1])
def test_scalar_loop(lowerer, n):
    x, o = numbers(n), np.zeros(n, np.float32)
    simulate(compiled(lowerer, "prefix", {"x": "*fp32", "o": "*fp32", "n": "i32"}, {"C": 64}), [x, o, n], 1)
    assert (np.abs(o - x.astype(np.float64).cumsum() - x.sum(dtype=np.float64)) <= 129 * UNIT * np.abs(x).sum()).all()


NEEDED = {"scores": 11, "state": 14}
"""Pairs of flags without which something is wrong, of 11 and 16: what the other two order, others order as well."""


@pytest.mark.parametrize("kernel", NEEDED)
def test_a_flag_taken_away_shows(lowerer, kernel):
    """Every `set_flag` with the `wait_flag` after it, taken out of a program one pair at a time."""
    n, C, K = 3, 64, 128
    names = ("q", "k") if kernel == "scores" else ("k", "v")
    signature = {**dict.fromkeys(names, "*fp32"), "o": "*fp32", "n": "i32"}
    text = compiled(lowerer, kernel, signature, {"C": C, "K": K}, {"set_workspace_multibuffer": 1})
    lines = text.splitlines()
    arrays = [
        numbers(n, C, K),
        numbers(n, C, K, seed=1),
        np.zeros((n, C, C if kernel == "scores" else K), np.float32),
        n,
    ]
    simulate(text, arrays, 1)
    shown = 0
    for first, line in enumerate(lines):
        flag = re.search(r"hivm\.hir\.set_flag(\[[^\]]*\])", line)
        later = range(first + 1, len(lines))
        second = flag and next((i for i in later if f"hir.wait_flag{flag.group(1)}" in lines[i]), None)
        if second is None:
            continue
        try:
            simulate("\n".join(line for i, line in enumerate(lines) if i not in (first, second)), arrays, 1)
        except (HazardError, SimulationError):
            shown += 1
    assert shown == NEEDED[kernel]


def test_a_barrier_taken_away_shows(lowerer):
    """Every barrier of the vector unit in a chain of vector code."""
    n, K = 3, 64
    signature = {"x": "*fp32", "y": "*fp32", "o": "*fp32", "n": "i32"}
    lines = compiled(lowerer, "tail", signature, {"C": 64, "K": K}).splitlines()
    arrays = [numbers(n, K), numbers(64, K), np.zeros((n, 64), np.float32), n]
    barriers = [number for number, line in enumerate(lines) if "pipe_barrier[<PIPE_V>]" in line]
    assert len(barriers) >= 4
    for number in barriers:
        with pytest.raises(HazardError, match="AIV"):
            simulate("\n".join(lines[:number] + lines[number + 1 :]), arrays, 1)


def test_a_hand_off_taken_away_shows(lowerer):
    n, C, K = 3, 64, 128
    signature = {"q": "*fp32", "k": "*fp32", "o": "*fp32", "n": "i32"}
    text = compiled(lowerer, "scores", signature, {"C": C, "K": K}, {"set_workspace_multibuffer": 1})
    arrays = [numbers(n, C, K), numbers(n, C, K, seed=1), np.zeros((n, C, C), np.float32), n]
    broken = re.sub(r".*sync_block_(?:set\[<CUBE>|wait\[<VECTOR>), <PIPE_FIX>.*\n", "", text)
    assert broken.count("\n") == text.count("\n") - 2
    with pytest.raises(HazardError, match="workspace"):
        simulate(broken, arrays, 1)


def test_launches_on_tensors(lowerer):
    """The stand-in for a Triton kernel: bf16, a strided tensor, and an argument that is not given."""
    kernel = SimulatedKernel.of(simulated_kernels.scores)
    q = torch.from_numpy(numbers(3, 64, 128)).bfloat16()
    o = torch.zeros(3, 64, 64)
    try:
        kernel[(2,)](q, q, o, 3, C=64, K=128, set_workspace_multibuffer=1)
        kernel[(1,)](q, q, o, 3, C=64, K=128, set_workspace_multibuffer=1)
        with pytest.raises(ValueError, match=r"unknown \['depth'\]"):
            kernel[(1,)](q, q, o, 3, C=64, K=128, depth=1)
    finally:
        kernel.close()
    assert len(kernel.compiled) == 1 and len(kernel.statistics) == 2
    wide = q.double()
    assert ((o - 2 * wide @ wide.mT).abs() <= 128 * UNIT * 2 * wide.abs() @ wide.abs().mT).all()
