"""Gated DeltaNet-2 and Gated DeltaProduct against the token loop in float64: outputs, states, gradients, refusals.

Bounds are those of `calls.py` and `test_backward.py`: the dataflow and its roundings are the same.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fla_npu.errors import ImplementationError, ShapeError
from fla_npu.ops import chunk_gated_delta_rule, chunk_kda, fused_recurrent_kda, library
from fla_npu.ops.checks import check_chunk_delta_product
from fla_npu.ops.common.chunk_form import delta_chunk_form
from fla_npu.ops.common.recurrence import delta_recurrence, packed_delta_recurrence
from fla_npu.ops.dispatch import explain, use_implementation
from fla_npu.ops.gated_delta_product import chunk_gated_delta_product
from fla_npu.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product
from fla_npu.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2, naive_chunk_gdn2, naive_recurrent_gdn2
from fla_npu.testing import CASES, make_inputs, nmse
from tests.ops.calls import DECAY_GRADIENT_NMSE, FLOAT32_NMSE, GRADIENT_NMSE, Arguments, assert_accurate

OPS = {
    "chunk_gdn2": chunk_gdn2,
    "fused_recurrent_gdn2": fused_recurrent_gdn2,
    "chunk_delta_product": chunk_gated_delta_product,
}
CHUNKED = ("chunk_gdn2", "chunk_delta_product")
GDN2 = ("chunk_gdn2", "fused_recurrent_gdn2")
INPUTS = ("q", "k", "v", "g", "beta", "b", "w", "A_log", "dt_bias", "initial_state")
PER_TOKEN = ("q", "g")
PER_UPDATE = ("k", "v", "beta", "b", "w")


def make_call(
    op: str,
    case: str = "ordinary",
    *,
    B: int = 1,
    T: int = 70,
    H: int = 2,
    HV: int = 4,
    K: int = 16,
    V: int = 12,
    n: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    bounds: list[int] | None = None,
    state: bool = True,
    decay: bool = True,
    l2norm: bool = False,
    gate: str = "none",
    v_first: bool = False,
    **options: Any,
) -> Arguments:
    """Keyword arguments of an op.

    Args:
        n: updates per token, of Gated DeltaProduct; which may also do without `decay`.
        gate: `none`, `softplus` or `bounded`; of GDN-2, as is `v_first`.
    """
    gdn2 = op in GDN2
    n = 1 if gdn2 else n
    if bounds is not None:
        B, T = 1, bounds[-1]
    sequences = None if bounds is None else len(bounds) - 1
    made = make_inputs(case, B=B, T=T * n, H=H, HV=HV, K=K, V=V, channel=gdn2, sequences=sequences, seed=seed)
    call: Arguments = {"output_final_state": True, **made._asdict(), **options}
    call["q"], call["g"] = call["q"][:, n - 1 :: n], call["g"][:, ::n]
    generator = torch.Generator().manual_seed(seed + 1)
    if gdn2:
        beta = call.pop("beta")[..., None]
        call["b"], call["w"] = (beta * (torch.rand(B, T, HV, x, generator=generator) + 0.5) for x in (K, V))
        if case == "equal keys":
            call["b"], call["w"] = beta.expand(-1, -1, -1, K), beta.expand(-1, -1, -1, V)
        if gate != "none":
            call["use_gate_in_kernel"] = True
            call["g"] = torch.randn(call["g"].shape, generator=generator)
            call["A_log"], call["dt_bias"] = (torch.rand(size, generator=generator) for size in (HV, HV * K))
            if gate == "bounded":
                call["lower_bound"] = -5.0
        if v_first:
            call["state_v_first"] = True
            call["initial_state"] = call["initial_state"].mT.contiguous()
    else:
        call["num_householder"] = n
        if not decay:
            call["g"] = None
    if l2norm:
        call["use_qk_l2norm_in_kernel"] = True
        call["q"], call["k"] = 3 * call["q"], 3 * call["k"]
    if not state:
        del call["initial_state"]
    if bounds is not None:
        call["cu_seqlens"] = torch.tensor(bounds)
    for name in ("q", "k", "v", "beta", "b", "w"):
        if name in call:
            call[name] = call[name].to(dtype)
    if dtype == torch.float64 and call["g"] is not None:
        call["g"] = call["g"].double()
    return call


def run(op: str, call: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    return OPS[op](**call)


def expected(op: str, call: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state in float64, from the public arguments; differentiable."""
    got = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    q, k, v, g = (got[name] for name in ("q", "k", "v", "g"))
    if got.get("use_qk_l2norm_in_kernel"):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if got.get("use_gate_in_kernel"):
        a, x = got["A_log"].exp()[:, None], g + got["dt_bias"].view(g.shape[2:])
        bound = got.get("lower_bound")
        g = -a * torch.logaddexp(x, torch.zeros_like(x)) if bound is None else bound / (1 + (-a * x).exp())
    arguments: Arguments = {
        "gk" if op in GDN2 else "g": g,
        **{name: got.get(name) for name in ("beta", "b", "w", "scale", "initial_state")},
        "updates": got.get("num_householder", 1),
        "state_v_first": bool(got.get("state_v_first")),
        "dtype": torch.float64,
    }
    if "cu_seqlens" in call:
        return packed_delta_recurrence(q, k, v, cu_seqlens=call["cu_seqlens"].tolist(), **arguments)
    return delta_recurrence(q, k, v, **arguments)


def check(op: str, call: Arguments) -> None:
    o, state = run(op, call)
    want_o, want_state = expected(op, call)
    assert o.dtype == call["q"].dtype
    assert_accurate("o", o, want_o)
    if not call["output_final_state"]:
        assert state is None
        return
    assert state is not None and state.dtype == torch.float32
    assert_accurate("final state", state, want_state)


def leaves_of(call: Arguments) -> tuple[Arguments, dict[str, torch.Tensor]]:
    leaves = {
        name: call[name].detach().clone().requires_grad_()
        for name in INPUTS
        if isinstance(call.get(name), torch.Tensor)
    }
    return {**call, **leaves}, leaves


def starts_of(results: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results if x is not None]


def gradients(op: str, call: Arguments) -> dict[str, torch.Tensor]:
    call, leaves = leaves_of(call)
    results = run(op, call)
    torch.autograd.backward([x for x in results if x is not None], starts_of(results))
    return {name: x.grad for name, x in leaves.items()}


def expected_gradients(op: str, call: Arguments) -> dict[str, torch.Tensor]:
    starts = [x.double() for x in starts_of(run(op, call))]
    _, leaves = leaves_of({name: x.double() if isinstance(x, torch.Tensor) else x for name, x in call.items()})
    results = expected(op, {**call, **leaves})[: len(starts)]
    grads = torch.autograd.grad(results, list(leaves.values()), starts, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def check_gradients(op: str, call: Arguments, ordinary: Arguments | None = None) -> None:
    """`ordinary` as in test_backward.py: a call whose gradients are as large as the terms of those of `call`."""
    got, want = gradients(op, call), expected_gradients(op, call)
    terms = {} if ordinary is None else expected_gradients(op, ordinary)
    for name, x in got.items():
        assert x.dtype == call[name].dtype, name
        bound = DECAY_GRADIENT_NMSE if name in ("g", "A_log", "dt_bias") else GRADIENT_NMSE
        if name == "g" and not want[name].any():
            # No state to decay. Sums of k dk that cancel are left with their rounding.
            size = torch.linalg.vector_norm(call["k"].double() * got["k"].double())
            assert torch.linalg.vector_norm(x.double()) <= bound**0.5 * size
            continue
        assert_accurate(f"d{name}", x, want[name], bound, terms=terms.get(name))


# --- the definitions ----------------------------------------------------------------------------------------------


def test_definition_of_the_product_by_matrices():
    """Per token `S = (I - beta_n k_n k_n^T) ... (I - beta_1 k_1 k_1^T) exp(g) S + ...`, read at the end."""
    n, T = 3, 5
    call = make_call("chunk_delta_product", T=T, H=1, HV=1, n=n)
    q, k, v, beta = (call[name].double()[0, :, 0] for name in ("q", "k", "v", "beta"))
    S = call["initial_state"].double()[0, 0]
    rows = []
    for t in range(T):
        S = call["g"].double()[0, t, 0].exp() * S
        for i in range(t * n, t * n + n):
            S = (torch.eye(16) - beta[i] * torch.outer(k[i], k[i])) @ S + beta[i] * torch.outer(k[i], v[i])
        rows.append(16**-0.5 * q[t] @ S)
    o, state = expected("chunk_delta_product", call)
    assert nmse(o[0, :, 0], torch.stack(rows)) < 1e-28 and nmse(state[0, 0], S) < 1e-28


def test_definition_of_gdn2_by_matrices():
    """`S = (I - k (b * k)^T) Diag(exp(g)) S + k (w * v)^T`."""
    call = make_call("chunk_gdn2", T=5, H=1, HV=1)
    q, k, v, g, b, w = (call[name].double()[0, :, 0] for name in ("q", "k", "v", "g", "b", "w"))
    S = call["initial_state"].double()[0, 0]
    rows = []
    for t in range(5):
        S = (torch.eye(16) - torch.outer(k[t], b[t] * k[t])) @ (g[t].exp()[:, None] * S) + torch.outer(
            k[t], w[t] * v[t]
        )
        rows.append(16**-0.5 * q[t] @ S)
    o, state = expected("chunk_gdn2", call)
    assert nmse(o[0, :, 0], torch.stack(rows)) < 1e-28 and nmse(state[0, 0], S) < 1e-28


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_chunk_form_of_gdn2(chunk_size: int):
    """The second definition agrees with the first, and with both at beta, b and w together."""
    call = make_call("chunk_gdn2", T=70)
    names = ("q", "k", "v", "g", "b", "w", "initial_state")
    q, k, v, g, b, w, state = (call[name].double() for name in names)
    beta = torch.rand(1, 70, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    both: Arguments = {"beta": beta, "b": b, "w": w, "initial_state": state, "dtype": torch.float64}
    got = delta_chunk_form(q, k, v, g=g, chunk_size=chunk_size, **both)
    for x, y in zip(got, delta_recurrence(q, k, v, gk=g, **both), strict=True):
        assert nmse(x, y) < 1e-24


def test_naive_names():
    call = make_call("chunk_gdn2", dtype=torch.bfloat16)
    arguments = {name: call[name] for name in ("q", "k", "v", "g", "b", "w", "initial_state")}
    for naive in (naive_recurrent_gdn2, naive_chunk_gdn2):
        o, state = naive(**arguments, output_final_state=True)
        assert o.dtype == torch.float32 and naive(**arguments)[1] is None
        for x, y in zip((o, state), expected("chunk_gdn2", call), strict=True):
            assert_accurate(naive.__name__, x, y)
    for bounds in (None, [0, 0, 20, 50]):
        call = make_call("chunk_delta_product", n=3, dtype=torch.float16, bounds=bounds)
        del call["output_final_state"]
        o, state = naive_recurrent_gated_delta_product(**call, scale=0.3)
        assert o.dtype == torch.float16
        for x, y in zip((o, state), expected("chunk_delta_product", {**call, "scale": 0.3}), strict=True):
            assert_accurate("naive", x, y)


# --- forward ------------------------------------------------------------------------------------------------------


@st.composite
def calls(
    draw: st.DrawFn, op: str, cases: tuple[str, ...] = CASES, longest: int = 400, narrowest: int = 1
) -> Arguments:
    """Any legal call of moderate size."""
    n = draw(st.sampled_from([1, 2, 2, 3, 4, 5, 70]))
    longest //= 1 if op in GDN2 else n
    bounds = None
    if draw(st.booleans()):
        bounds = [0]
        for piece in draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 15, 31, 32, 33, 64, 65]), min_size=1, max_size=5)):
            bounds.append(min(bounds[-1] + piece, max(longest, 1)))
    H, HV = draw(st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]))
    options: Arguments = {"scale": 0.3} if draw(st.booleans()) else {}
    return make_call(
        op,
        draw(st.sampled_from(cases)),
        B=draw(st.sampled_from([1, 2])),
        T=min(max(longest, 1), draw(st.sampled_from([0, 1, 2, 21, 22, 31, 32, 33, 63, 64, 65, 130, 200]))),
        H=H,
        HV=HV,
        K=draw(st.sampled_from([narrowest, 12, 16, 60, 96])),
        V=draw(st.sampled_from([1, 12, 16, 60, 100])),
        n=n,
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16])),
        seed=draw(st.integers(0, 9)),
        bounds=bounds,
        state=draw(st.booleans()),
        decay=draw(st.integers(0, 4)) > 0,
        l2norm=draw(st.booleans()),
        gate=draw(st.sampled_from(["none", "none", "softplus", "bounded"])),
        v_first=draw(st.booleans()),
        **{**options, "output_final_state": draw(st.integers(0, 4)) > 0},
    )


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=25)
@given(data=st.data())
def test_any_call(op: str, data: st.DataObject):
    check(op, data.draw(calls(op)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_input(op: str, case: str):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(op, make_call(op, case, B=2, T=100, K=24, V=20, dtype=dtype))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 64, 65])
@pytest.mark.parametrize("decay", [True, False])
def test_updates_per_token(n: int, decay: bool):
    """A chunk has whole tokens: 64 updates, fewer where n does not divide 64, more where it exceeds it."""
    options = check_chunk_delta_product(**make_call("chunk_delta_product", n=n, decay=decay)).options
    assert options.chunk_size == {1: 64, 2: 32, 3: 21, 4: 16, 7: 9, 64: 1, 65: 1}[n]
    for T in (1, 2, 64 // n, 64 // n + 1, 2 * (64 // n) + 1):
        check("chunk_delta_product", make_call("chunk_delta_product", T=T, n=n, decay=decay, l2norm=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bounds", [[0, 0], [0, 70], [0, 0, 70, 70], [0, 1, 2, 3], [0, 32, 64, 96, 100], [0, 31, 97]])
def test_packs(op: str, bounds: list[int]):
    for dtype in (torch.int32, torch.int64):
        for state in (False, True):
            call = make_call(op, bounds=bounds, state=state, v_first=True)
            cu_seqlens = call["cu_seqlens"].to(dtype)
            check(op, {**call, "cu_seqlens": cu_seqlens})
    if op in CHUNKED:
        check(op, {**call, "cu_seqlens_cpu": call["cu_seqlens"]})


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_do(op: str):
    for bounds in (None, [0, 0, 0]):
        call = make_call(op, T=0, bounds=bounds)
        o, state = run(op, call)
        assert o.shape == (1, 0, 4, 12) and torch.equal(state, call["initial_state"])
        assert state.data_ptr() != call["initial_state"].data_ptr()
    o, state = run(op, make_call(op, B=0))
    assert o.shape == (0, 70, 4, 12) and state.shape == (0, 4, 16, 12)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 70])
def test_strided_inputs(op: str, T: int):
    call = make_call(op, B=2, T=T)
    want, strided = run(op, call), dict(call)
    for name, x in call.items():
        if name in ("q", "k", "b"):
            strided[name] = x.movedim(1, -1).contiguous().movedim(-1, 1)
        elif name == "initial_state":
            strided[name] = x.mT.contiguous().mT
        elif isinstance(x, torch.Tensor):
            strided[name] = torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0]
    before = {name: x.clone() for name, x in strided.items() if isinstance(x, torch.Tensor)}
    for x, y in zip(run(op, strided), want, strict=True):
        assert nmse(x, y) < 1e-12
    assert all(torch.equal(strided[name], x) for name, x in before.items()), "an argument was written to"


@pytest.mark.parametrize("op", OPS)
def test_float64_is_computed_in_float64(op: str):
    """Up to the digits of FLA's float32 constant for 1 / ln 2; also from the state that a call returned."""
    call = make_call(op, T=100, dtype=torch.float64, l2norm=True)
    for _ in range(2):
        o, state = run(op, call)
        for x, y in zip((o, state), expected(op, call), strict=True):
            assert x.dtype == torch.float64 and nmse(x, y) < 1e-15
        call["initial_state"] = state


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cuts", [[1, 2, 3], [32], [69], [21, 40]])
def test_pieces_equal_one_pass(op: str, cuts: list[int]):
    call = make_call(op, B=2, n=3)
    n = call.get("num_householder", 1)
    outputs, state = [], call["initial_state"]
    for a, b in pairwise([0, *cuts, 70]):
        piece = {name: call[name][:, a:b] for name in PER_TOKEN}
        piece |= {name: call[name][:, a * n : b * n] for name in PER_UPDATE if name in call}
        o, state = run(op, {**call, **piece, "initial_state": state})
        outputs.append(o)
    for x, y in zip((torch.cat(outputs, 1), state), expected(op, call), strict=True):
        assert_accurate("pieces", x, y)


def test_one_update_is_the_gated_delta_rule():
    call = make_call("chunk_delta_product", T=100, n=1, l2norm=True)
    got = run("chunk_delta_product", call)
    del call["num_householder"]
    assert all(torch.equal(x, y) for x, y in zip(got, chunk_gated_delta_rule(**call), strict=True))


@pytest.mark.parametrize("n", [2, 3])
def test_the_product_is_the_gated_delta_rule_over_its_updates(n: int):
    """With the decay at the first update of a token, the output at the last."""
    call = make_call("chunk_delta_product", T=100, n=n)
    got = run("chunk_delta_product", call)
    q, g = torch.zeros_like(call["k"]), torch.zeros(call["beta"].shape)
    q[:, n - 1 :: n], g[:, ::n] = call["q"], call["g"]
    del call["num_householder"]
    o, state = chunk_gated_delta_rule(**{**call, "q": q, "g": g})
    assert nmse(got[0], o[:, n - 1 :: n]) < FLOAT32_NMSE and nmse(got[1], state) < FLOAT32_NMSE


@pytest.mark.parametrize(("op", "kda"), [("chunk_gdn2", chunk_kda), ("fused_recurrent_gdn2", fused_recurrent_kda)])
@pytest.mark.parametrize("T", [1, 100])
def test_equal_gates_are_kimi_delta_attention(op: str, kda: Any, T: int):
    call = make_call(op, T=T, gate="softplus", v_first=True)
    beta = call["b"][..., :1]
    got = run(op, {**call, "b": beta.expand_as(call["b"]), "w": beta.expand_as(call["w"])})
    del call["b"], call["w"]
    for x, y in zip(got, kda(**call, beta=beta[..., 0]), strict=True):
        assert nmse(x, y) < FLOAT32_NMSE


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 70, 70, 200]])
def test_intermediate_states(v_first: bool, bounds: list[int] | None):
    call = make_call("chunk_gdn2", T=200, bounds=bounds, v_first=v_first)
    with torch.inference_mode():
        o, state, h = chunk_gdn2(**call, return_intermediate_states=True)
    for x, y in zip((o, state), run("chunk_gdn2", call), strict=True):
        assert torch.equal(x, y)
    starts = [0, 64, 128, 192] if bounds is None else [0, 64, 70, 134, 198]
    assert h.shape[:3] == (1, len(starts), 4)
    first = {name: call[name][:, :64] for name in (*PER_TOKEN, *PER_UPDATE) if name in call}
    first["initial_state"] = call["initial_state"][:1]
    want = expected("chunk_gdn2", {**{k: v for k, v in call.items() if k != "cu_seqlens"}, **first})[1]
    assert_accurate("state after 64 tokens", h[:, 1], want)


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", CHUNKED)
@settings(max_examples=15)
@given(data=st.data())
def test_gradients_of_any_call(op: str, data: st.DataObject):
    """But for what is rounding alone: a norm of one channel, and the decay of a few tokens that erase the state."""
    cases = tuple(case for case in CASES if case != "equal keys")
    call = data.draw(calls(op, cases, longest=200, narrowest=12))
    assume(call["q"].shape[1] > 0)
    if call["g"] is not None:
        call["g"] = call["g"].clamp_min(-1000)  # the definition has no derivative at -inf
    check_gradients(op, call)


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("case", [case for case in CASES if case != "sudden decay"])
def test_gradients_of_every_kind_of_input(op: str, case: str):
    for options in ({"n": 3}, {"l2norm": True, "gate": "softplus", "v_first": True}):
        ordinary = make_call(op, T=100, **options) if case == "equal keys" else None
        check_gradients(op, make_call(op, case, T=100, **options), ordinary)


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize(("T", "strength"), [(5, 0.1), (70, 0.1), (70, 30.0)])
def test_numerical_gradients(op: str, T: int, strength: float):
    """By finite differences in float64; a strength of 30 per token leaves the cheap way of decays per channel."""
    call = make_call(op, T=T, H=1, HV=2, K=3, V=2, dtype=torch.float64, l2norm=True)
    call["g"] = -strength * torch.rand(call["g"].shape, generator=torch.Generator().manual_seed(0)).double()
    call["initial_state"] = call["initial_state"].float() if op in GDN2 else call["initial_state"].double()
    call, leaves = leaves_of(call)
    names = [name for name in leaves if leaves[name].dtype == torch.float64]

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return run(op, {**call, **dict(zip(names, tensors, strict=True))})

    # The seventh digit is that of FLA's float32 constant for 1 / ln 2.
    assert torch.autograd.gradcheck(
        function, tuple(leaves[name] for name in names), rtol=1e-5, atol=1e-6, fast_mode=True
    )


@pytest.mark.parametrize("op", CHUNKED)
def test_gradients_of_strided_and_expanded_inputs(op: str):
    call = make_call(op, T=100)
    k = call["k"][:, :1].expand_as(call["k"])
    check_gradients(op, {**call, "k": k}, call)
    call["q"] = call["q"].movedim(1, -1).contiguous().movedim(-1, 1)
    check_gradients(op, call)


def test_kept_states_give_the_same_gradients():
    call = make_call("chunk_gdn2", T=150, gate="bounded")
    got, want = (gradients("chunk_gdn2", {**call, "disable_recompute": kept}) for kept in (True, False))
    assert all(torch.equal(got[name], x) for name, x in want.items())


def test_the_recurrent_op_refuses_the_backward_pass():
    for T in (1, 70):
        call, _ = leaves_of(make_call("fused_recurrent_gdn2", T=T))
        with pytest.raises(NotImplementedError, match=r"train through .* chunk_gdn2"):
            run("fused_recurrent_gdn2", call)[0].sum().backward()


# --- implementations, graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_implementations(op: str):
    assert explain(op).implementation == "eager"
    choice = explain(op, "npu", chip="910B3")
    assert choice.implementation == "eager" and "no kernels for this op" in choice.reason
    call = make_call(op, bounds=[0, 1, 1, 40])
    with use_implementation("reference"):
        for x, y in zip(run(op, call), expected(op, call), strict=True):
            assert_accurate("reference", x, y)
    with use_implementation("triton"), pytest.raises(ImplementationError, match="no kernels for this op"):
        run(op, call)


EVERYTHING: Arguments = {"l2norm": True, "gate": "softplus", "v_first": True}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "options",
    [{}, EVERYTHING, {"output_final_state": False, "state": False, "decay": False}, {"bounds": [0, 1, 1, 40, 90]}],
    ids=str,
)
def test_in_a_graph(op: str, options: Arguments):
    torch.compiler.reset()
    call = make_call(op, **options)

    def model(call: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, state = OPS[op](**{**call, "v": call["v"] * 2})
        return o + 1, state

    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for x, y in zip(fast(call), model(call), strict=True):
        assert (x is None and y is None) or (torch.equal(x, y) and x.stride() == y.stride())
    if op not in CHUNKED:
        return
    grads = []
    for function in (fast, model):
        leafy, leaves = leaves_of(call)
        results = function(leafy)
        torch.autograd.backward([x for x in results if x is not None], starts_of(results))
        grads.append({name: x.grad for name, x in leaves.items()})
    assert all(torch.equal(grads[1][name], x) for name, x in grads[0].items())


@pytest.mark.parametrize("op", OPS)
def test_library(op: str):
    taken: list[Any] = []

    def take(*args: Any) -> tuple[None, None]:
        taken.extend(args)
        return None, None

    call, _ = leaves_of(make_call(op, T=40, B=2)) if op in CHUNKED else (make_call(op, T=40, B=2), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "delta_rule", take)
        library.traced(op, call)
    torch.library.opcheck(library.delta_rule, tuple(taken))


@pytest.mark.parametrize("op", CHUNKED)
def test_autocast_changes_nothing(op: str):
    call = make_call(op, T=100, dtype=torch.bfloat16)
    want, want_grads = run(op, call), gradients(op, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, grads = run(op, call), gradients(op, call)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert all(torch.equal(grads[name], x) for name, x in want_grads.items())


# --- refusals -----------------------------------------------------------------------------------------------------

BAD_PRODUCTS = [
    ({"num_householder": 3}, ShapeError, r"k must have shape \[B, T \* num_householder, H, K\]=\[1, 210, 2, 16\], got"),
    ({"num_householder": 0}, ValueError, r"num_householder must be an integer of at least 1, got int 0"),
    ({"num_householder": 2.0}, ValueError, r"num_householder must be an integer of at least 1, got float 2.0"),
    (
        {"v": torch.zeros(1, 70, 4, 12)},
        ShapeError,
        r"v must have shape .* T \* num_householder=140, got \[1, 70, 4, 12\]",
    ),
    ({"v": torch.zeros(1, 140, 3, 12)}, ShapeError, r"HV=3\) must be evenly divisible by num_heads \(H=2\)"),
    (
        {"beta": torch.zeros(1, 70, 4)},
        ShapeError,
        r"beta must have shape \[B, T \* num_householder, HV\]=\[1, 140, 4\]",
    ),
    ({"g": torch.zeros(1, 140, 4)}, ShapeError, r"g must have shape \[B, T, HV\]=\[1, 70, 4\], got \[1, 140, 4\]"),
    ({"initial_state": torch.zeros(1, 4, 12, 16)}, ShapeError, r"initial_state must have shape"),
    ({"cu_seqlens": torch.tensor([0, 140])}, ValueError, r"cu_seqlens must start at 0 and end at T=70, got 0 and 140"),
    ({"cp_context": object()}, NotImplementedError, r"cp_context must be None"),
]
BAD_GDN2 = [
    ({"b": torch.zeros(1, 70, 4)}, ShapeError, r"b must have shape \[B, T, HV, K\]=\[1, 70, 4, 16\], got \[1, 70, 4\]"),
    ({"w": torch.zeros(1, 70, 4, 16)}, ShapeError, r"w must have shape \[B, T, HV, V\]=\[1, 70, 4, 12\], got"),
    ({"b": None}, TypeError, r"b must be a torch.Tensor, got NoneType None"),
    ({"w": None}, TypeError, r"w must be a torch.Tensor, got NoneType None"),
    ({"g": torch.zeros(1, 70, 4)}, ShapeError, r"g must have shape \[B, T, HV, K\]=\[1, 70, 4, 16\], got"),
    ({"k": torch.zeros(1, 69, 2, 16)}, ShapeError, r"q and k must have the same shape"),
    ({"use_gate_in_kernel": True}, ValueError, r"`A_log` must be provided"),
    ({"cu_seqlens": torch.tensor([0, 30, 70])}, ValueError, r"number of initial states .* 2 rather than 1"),
    ({"state_v_first": True, "transpose_state_layout": True}, ValueError, r"not both"),
]
BAD_CHUNKED_GDN2 = [
    ({"chunk_size": 32}, ValueError, r"`chunk_size` must be 64 for GDN-2, got 32"),
    ({"initial_state": torch.zeros(1, 4, 16, 12).half()}, AssertionError, r"must be in float32, got torch.float16"),
    (
        {"safe_gate": True, "use_gate_in_kernel": True, "A_log": torch.zeros(4)},
        ValueError,
        r"`lower_bound` must be given",
    ),
    (
        {"safe_gate": True, "use_gate_in_kernel": True, "lower_bound": -6.0},
        ValueError,
        r"safe range \[-5, 0\), got -6.0",
    ),
    ({"return_intermediate_states": True}, AssertionError, r"only allowed in inference mode"),
    ({"cp_context": object()}, NotImplementedError, r"cp_context must be None"),
]
REFUSALS = [
    *[("chunk_delta_product", *bad) for bad in BAD_PRODUCTS],
    *[(op, *bad) for op in GDN2 for bad in BAD_GDN2],
    *[("chunk_gdn2", *bad) for bad in BAD_CHUNKED_GDN2],
]


@pytest.mark.parametrize(("op", "wrong", "error", "message"), REFUSALS)
def test_refusals(op: str, wrong: Arguments, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        run(op, {**make_call(op), **wrong})


def test_unknown_arguments_are_named():
    with pytest.warns(UserWarning, match="chunk_gdn2 ignores the argument `use_gate_in_kernal`"):
        run("chunk_gdn2", {**make_call("chunk_gdn2"), "use_gate_in_kernal": True})
