"""Outputs and final states of the four public ops against the token loop in float64.

Inputs of 16 bits are rounded first: the reference sees the same rounded numbers, so that an error is the op's own.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.ops.common import chunked
from fla_npu.testing import CASES, nmse
from tests.ops.calls import (
    CHUNKED,
    FLOAT32_NMSE,
    OPS,
    RECURRENT,
    assert_accurate,
    check,
    expected,
    make_call,
    run,
    storage_nmse,
)

lengths = st.sampled_from([0, 1, 2, 3, 31, 63, 64, 65, 127, 129, 200, 300])
heads = st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4), (3, 6)])
sides = st.sampled_from([1, 2, 12, 16, 60, 96, 100, 192])
dtypes = st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16])


def chunk_sizes(op: str) -> list[int]:
    return {"chunk_gdn": [16, 32, 64], "chunk_kda": [32, 64]}.get(op, [])


def gates(op: str) -> list[str]:
    return ["none", "none", "softplus", "softplus without bias"] + (
        ["bounded", "bounded without A_log"] if op.endswith("kda") else []
    )


@st.composite
def calls(draw: st.DrawFn, op: str) -> dict[str, Any]:
    """Any legal call of moderate size."""
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
    if chunk_sizes(op):
        options["chunk_size"] = draw(st.sampled_from(chunk_sizes(op)))
    if not draw(st.integers(0, 4)):
        options["output_final_state"] = False
    bounds = None
    if draw(st.booleans()):
        pieces = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 15, 16, 63, 64, 65, 100]), min_size=1, max_size=6))
        repeats = draw(st.integers(1, 2))
        bounds = [0]
        for piece in pieces:
            bounds += [bounds[-1] + piece * (i + 1) for i in range(repeats)]
    H, HV = draw(heads)
    return make_call(
        op,
        draw(st.sampled_from(CASES)),
        B=draw(st.sampled_from([1, 2, 3])),
        T=draw(lengths),
        H=H,
        HV=HV,
        K=draw(sides),
        V=draw(sides),
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 9)),
        bounds=bounds,
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        state=draw(st.booleans()),
        v_first=draw(st.booleans()),
        l2norm=draw(st.booleans()),
        gate=draw(st.sampled_from(gates(op))),
        beta=draw(st.sampled_from(["plain", "plain", "sigmoid", "negative"])),
        **options,
    )


@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
def test_any_call(op: str, data: st.DataObject):
    check(op, data.draw(calls(op)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_input(op: str, case: str, dtype: torch.dtype):
    check(op, make_call(op, case, B=2, T=150, K=24, V=20, dtype=dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 128, 129])
def test_chunk_boundaries(op: str, T: int):
    for chunk_size in chunk_sizes(op) or [None]:
        options = {} if chunk_size is None else {"chunk_size": chunk_size}
        check(op, make_call(op, T=T, **options))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("gate", ["none", "softplus", "softplus without bias", "bounded", "bounded without A_log"])
@pytest.mark.parametrize("beta", ["plain", "sigmoid", "negative"])
def test_in_kernel_options(op: str, gate: str, beta: str):
    if gate not in gates(op):
        pytest.skip("KDA only")
    for l2norm in (False, True):
        check(op, make_call(op, B=2, T=100, l2norm=l2norm, gate=gate, beta=beta))
        check(op, make_call(op, B=3, T=1, l2norm=l2norm, gate=gate, beta=beta))
        check(op, make_call(op, bounds=[0, 1, 1, 2, 70, 90], l2norm=l2norm, gate=gate, beta=beta, v_first=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("size", [0.0, 1e-4, 1e-3, 1e-2])
def test_epsilon_of_the_norm(op: str, T: int, size: float):
    """1e-6 under the root: rows of such sizes come out shorter than 1, and rows of zeros as zeros."""
    call = make_call(op, T=T, l2norm=True)
    call["q"], call["k"] = size * call["q"], size * call["k"]
    check(op, call)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "bounds",
    [
        [0, 0],
        [0, 0, 0],
        [0, 70],
        [0, 0, 70],
        [0, 70, 70],
        [0, 1, 2, 3],
        [0, 64, 128, 192, 200],
        [0, 5, 10, 10, 15, 16, 17, 17, 17, 90],
        [0, 63, 64, 129],
    ],
    ids=str,
)
def test_packs(op: str, bounds: list[int]):
    for dtype in (torch.int32, torch.int64):
        for v_first in (False, True):
            for state in (False, True):
                check(op, make_call(op, bounds=bounds, index_dtype=dtype, v_first=v_first, state=state))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bounds", [None, [0, 0, 0]])
def test_no_tokens(op: str, bounds: list[int] | None):
    call = make_call(op, T=0, bounds=bounds)
    o, state = run(op, call)
    assert o.shape == (1, 0, 4, 12)
    assert torch.equal(state, call["initial_state"]) and state.data_ptr() != call["initial_state"].data_ptr()
    del call["initial_state"]
    assert not run(op, call)[1].any()


@pytest.mark.parametrize("op", OPS)
def test_no_batch(op: str):
    o, state = run(op, make_call(op, B=0))
    assert o.shape == (0, 70, 4, 12) and state.shape == (0, 4, 16, 12)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 70])
def test_strided_inputs(op: str, T: int):
    """Views give what their contiguous copies give: every second row, channels of something larger, T fastest."""
    call = make_call(op, B=2, T=T)
    want = run(op, call)
    strided = dict(call)
    for name, x in call.items():
        if not isinstance(x, torch.Tensor):
            continue
        if name in ("q", "k"):
            strided[name] = x.movedim(1, -1).contiguous().movedim(-1, 1)
        elif name == "initial_state":
            strided[name] = x.mT.contiguous().mT
        else:
            strided[name] = torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0]
    for x, y in zip(run(op, strided), want, strict=True):
        assert nmse(x, y) < 1e-12


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 70])
def test_expanded_inputs(op: str, T: int):
    """All tokens share one gate and one key, as a view of no extra memory."""
    call = make_call(op, B=2, T=T)
    for name in ("k", "g", "beta"):
        call[name] = call[name][:, :1].expand_as(call[name])
    check(op, call)


@pytest.mark.parametrize("op", OPS)
def test_float64_is_computed_in_float64(op: str):
    """Up to the digits of FLA's float32 constant for 1 / ln 2; also from the state that a call returned."""
    call = make_call(op, T=100, dtype=torch.float64)
    for _ in range(2):
        o, state = run(op, call)
        for x, y in zip((o, state), expected(op, call), strict=True):
            assert x.dtype == torch.float64 and nmse(x, y) < 1e-15
        call["initial_state"] = state


@pytest.mark.parametrize("op", OPS)
def test_scale(op: str):
    """It multiplies o and nothing else, and is K ** -0.5 unless given."""
    call = make_call(op, T=100)
    o, state = run(op, call)
    assert torch.equal(run(op, {**call, "scale": 16**-0.5})[0], o)
    scaled_o, scaled_state = run(op, {**call, "scale": 16**-0.5 * 4})
    assert torch.equal(scaled_state, state)
    assert torch.equal(scaled_o, 4 * o), "a power of two changes no rounding"
    assert not run(op, {**call, "scale": 0.0})[0].any()


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("T", [64, 512])
def test_equal_keys(op: str, dtype: torch.dtype, T: int):
    """The case that a doubling inverse of 64 tokens fails, see `test_solve.py`."""
    check(op, make_call(op, "equal keys", T=T, K=64, V=64, dtype=dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("total", [-1.0, -80.0, -88.0, -104.0, -320.0, -1280.0, -1e5])
def test_sum_of_decays_in_a_chunk(op: str, total: float):
    """-320 is the limit of a safe gate, -88 that of exp in float32. Even and uneven over tokens and channels."""
    call = make_call(op, T=512, K=32, V=32)
    uneven = torch.rand(call["g"].shape, generator=torch.Generator().manual_seed(0))
    for share in (torch.ones_like(uneven), 2 * uneven, uneven.sub(0.9).clamp_min(0) * 200):
        check(op, {**call, "g": total / 64 * share})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", [0, 1, 31, 32, 62, 63, 64, 100])
@pytest.mark.parametrize("value", [-1000.0, float("-inf")])
def test_one_sudden_decay(op: str, where: int, value: float):
    """It forgets all before it and costs what comes after it no digits."""
    call = make_call(op, T=130)
    call["g"][:, where] = value
    check(op, call, 1e-12)
    if op.endswith("kda"):
        call = make_call(op, T=130)
        call["g"][:, where, 1, 3] = value
        check(op, call, 1e-12)


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize(("strength", "size"), [(0.3, 64), (3.0, 32), (6.0, 16), (60.0, 0)])
def test_all_ways_of_channel_decays_serve(op: str, strength: float, size: int, monkeypatch: pytest.MonkeyPatch):
    """Weak decays are referenced to the middle of a chunk or of a piece of it, strong ones go by levels."""
    call = make_call(op, T=200)
    call["g"] = -strength * torch.rand(call["g"].shape, generator=torch.Generator().manual_seed(0))
    sizes = []
    original = chunked.referenced_size

    def spy(g: torch.Tensor) -> int:
        sizes.append(original(g))
        return sizes[-1]

    monkeypatch.setattr(chunked, "referenced_size", spy)
    check(op, call)
    assert sizes[:3] == [size] * 3


@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_levels_alone(op: str, monkeypatch: pytest.MonkeyPatch):
    """On a device, where values are not looked at, every chunk goes by levels."""
    monkeypatch.setattr("fla_npu.ops.common.stages.REACH", -1.0)
    for case in CASES:
        check(op, make_call(op, case, T=150))
    check(op, make_call(op, bounds=[0, 3, 6, 50, 50, 51]))


@pytest.mark.parametrize("op", OPS)
def test_no_matter_how_many_sequences_are_taken_together(op: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fla_npu.ops.common.prepare.runs.__defaults__", (300,))
    check(op, make_call(op, B=5, T=70))
    check(op, make_call(op, B=5, T=1))
    check(op, make_call(op, bounds=[0, 20, 40, 60, 80, 100, 100, 101, 102, 103]))


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_the_result_is_the_only_one(op: str, dtype: torch.dtype):
    """Given 16-bit inputs, o differs from the float64 result by its storage, the state by float32 arithmetic alone."""
    call = make_call(op, T=300, K=64, V=64, dtype=dtype)
    want_o, want_state = expected(op, call)
    o, state = run(op, call)
    rounded = nmse(want_o.to(dtype), want_o)
    assert rounded <= storage_nmse(want_o, dtype)
    assert nmse(o, want_o) < 1.01 * rounded
    assert_accurate("state", state, want_state, FLOAT32_NMSE)


@pytest.mark.parametrize("op", ["chunk_kda"])
@pytest.mark.parametrize("bounds", [None, [0, 64, 64, 100, 230, 360], [0, 40, 80, 120]])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_between_chunks(op: str, bounds: list[int] | None, v_first: bool, dtype: torch.dtype):
    """`return_intermediate_states`: the state before every chunk, those of a pack in one row, in the dtype of k."""
    call = make_call(op, B=2, T=150, bounds=bounds, v_first=v_first, dtype=dtype, chunk_size=32)
    with torch.inference_mode():
        o, state, h = OPS[op](**call, return_intermediate_states=True)
        plain_o, plain_state = run(op, call)
    assert torch.equal(o, plain_o) and torch.equal(state, plain_state) and h.dtype == dtype
    rows = []
    for n, (start, end) in enumerate(pairwise(bounds) if bounds else [(0, 150)] * 2):
        row = [torch.zeros(0, *state.shape[1:], dtype=torch.float64)]
        for middle in range(start, end, 32):
            cut = {
                name: x[:, start:middle] if bounds else x[n : n + 1, start:middle]
                for name, x in call.items()
                if name in ("q", "k", "v", "g", "beta")
            }
            initial = call["initial_state"][n : n + 1]
            row.append(expected(op, {**cut, "initial_state": initial, "state_v_first": v_first})[1])
        rows.append(torch.cat(row))
    want = torch.cat(rows)[None] if bounds else torch.stack(rows)
    assert_accurate("h", h, want)


@pytest.mark.parametrize("op", RECURRENT)
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("v_first", [False, True])
def test_beta_per_value_channel(op: str, T: int, v_first: bool):
    for options in ({"B": 2, "T": T}, {"bounds": [0, T, T, 2 * T, 3 * T]}):
        for beta in ("plain", "sigmoid"):
            call = make_call(op, v_first=v_first, beta=beta, **options)
            call["beta"] = call["beta"][..., None] * torch.rand(call["v"].shape, generator=torch.Generator())
            check(op, call)


@pytest.mark.parametrize("decays", ["", "g", "gk", "gv", "g gk", "gk gv", "g gk gv"])
@pytest.mark.parametrize("T", [1, 7, 70])
def test_decays_of_recurrent_gdn(decays: str, T: int):
    for options in ({"B": 2, "T": T}, {"bounds": [0, T, T, 2 * T]}, {"B": 2, "T": T, "v_first": True}):
        call = make_call("fused_recurrent_gdn", K=16, V=12, **options)
        generator = torch.Generator().manual_seed(1)
        shape = call["v"].shape[:3]
        call["gk"] = -torch.rand(*shape, 16, generator=generator)
        call["gv"] = -torch.rand(*shape, 12, generator=generator)
        dropped = {"g", "gk", "gv"} - set(decays.split())
        check("fused_recurrent_gdn", {name: x for name, x in call.items() if name not in dropped})


def test_missing_beta_is_one_for_every_value_head():
    call = make_call("fused_recurrent_gdn", H=2, HV=6)
    del call["beta"]
    check("fused_recurrent_gdn", call)
    check("fused_recurrent_gdn", {**call, "beta": torch.ones(1, 70, 6)})


def test_infinite_sums_of_decays_per_channel_and_head():
    """A channel that forgets at every token, next to one that never does."""
    call = make_call("chunk_kda", T=130)
    call["g"][..., 0::2] = float("-inf")
    call["g"][..., 1::2] = 0.0
    check("chunk_kda", call)
