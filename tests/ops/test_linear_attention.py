"""DeltaNet and the ops without a delta rule against the token loop in float64: outputs, states, gradients, refusals.

Bounds are those of `calls.py` and `test_backward.py`: the dataflow and its roundings are the same.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fla_npu import ops
from fla_npu.errors import ImplementationError, ShapeError
from fla_npu.ops import dispatch, library
from fla_npu.ops.common.recurrence import delta_recurrence
from fla_npu.ops.delta_rule import naive as delta_naive
from fla_npu.ops.dispatch import explain, use_implementation
from fla_npu.ops.gla.naive import naive_recurrent_gla
from fla_npu.ops.retention.decay import retention_decay
from fla_npu.ops.retention.naive import naive_retention
from fla_npu.ops.simple_gla import naive as simple_naive
from fla_npu.testing import CASES, make_inputs, nmse
from tests.ops import test_variants
from tests.ops.calls import DECAY_GRADIENT_NMSE, GRADIENT_NMSE, Arguments, assert_accurate

DELTA = ("chunk_delta_rule", "fused_recurrent_delta_rule")
SIMPLE = ("chunk_simple_gla", "fused_recurrent_simple_gla")
GLA = ("chunk_gla", "fused_recurrent_gla")
OPS = (*DELTA, *SIMPLE, *GLA)
REVERSIBLE = ("fused_recurrent_simple_gla", "fused_recurrent_gla")
BY_CHANNEL = ("fused_recurrent_delta_rule", "fused_recurrent_gla")
INPUTS = ("q", "k", "v", "g", "g_gamma", "gk", "gv", "beta", "initial_state")
PER_TOKEN = ("q", "k", "v", "g", "gk", "gv", "beta")


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
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    bounds: list[int] | None = None,
    state: bool = True,
    l2norm: bool = False,
    by_channel: bool = False,
    decay: str = "per token",
    v_first: bool = False,
    **options: Any,
) -> Arguments:
    """Keyword arguments of an op.

    Args:
        l2norm: of the delta rule.
        by_channel: beta or a further decay per value channel, of the recurrent delta rule and of recurrent GLA.
        decay: `per token`, `constant` (of simple GLA; of GLA per token, too) or `none` (not of chunked GLA); of the
            ops without the delta rule, as is `v_first`.
    """
    if bounds is not None:
        B, T = 1, bounds[-1]
    sequences = None if bounds is None else len(bounds) - 1
    made = make_inputs(
        case, B=B, T=T, H=H, HV=HV, K=K, V=V, channel=op in GLA, sequences=sequences, dtype=dtype, seed=seed
    )
    call: Arguments = {"output_final_state": True, **made._asdict(), **options}
    generator = torch.Generator().manual_seed(seed + 1)
    g = call.pop("g").to(torch.float64 if dtype == torch.float64 else torch.float32)
    if op in DELTA:
        if by_channel and op in BY_CHANNEL:
            call["beta"] = torch.rand(B, T, HV, V, generator=generator).to(dtype)
    else:
        del call["beta"]
        if op in SIMPLE and decay == "constant":
            call["g_gamma"] = -torch.rand(HV, generator=generator).to(g)
        elif decay != "none" or op == "chunk_gla":
            call["gk" if op == "fused_recurrent_gla" else "g"] = g
        if by_channel and op in BY_CHANNEL:
            call["gv"] = -torch.rand(B, T, HV, V, generator=generator).to(g)
        if v_first:
            call["state_v_first"] = True
            call["initial_state"] = call["initial_state"].mT.contiguous()
    if l2norm:
        call["use_qk_l2norm_in_kernel"] = True
        call["q"], call["k"] = 3 * call["q"], 3 * call["k"]
    if not state:
        del call["initial_state"]
    elif dtype == torch.float64:
        call["initial_state"] = call["initial_state"].double()
    if bounds is not None:
        call["cu_seqlens"] = torch.tensor(bounds)
    return call


def run(op: str, call: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    return getattr(ops, op)(**call)


def expected(op: str, call: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state in float64, from the public arguments; differentiable."""
    got = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    if got.get("use_qk_l2norm_in_kernel"):
        for name in ("q", "k"):
            got[name] = got[name] / (got[name].square().sum(-1, keepdim=True) + 1e-6).sqrt()
    if "g_gamma" in got:
        got["g"] = got["g_gamma"].expand(*got["q"].shape[:2], -1)
    if op == "chunk_gla":
        got["gk"] = got.pop("g")
    tokens = {name: got[name] for name in PER_TOKEN if got.get(name) is not None}
    state = got.get("initial_state")
    turn = (lambda x: x.flip(1)) if got.get("reverse") else (lambda x: x)
    results = []
    bounds = call["cu_seqlens"].tolist() if "cu_seqlens" in call else None
    for n, (a, b) in enumerate(pairwise(bounds or [0, call["q"].shape[1]])):
        o, final = delta_recurrence(
            **{name: turn(x[:, a:b]) for name, x in tokens.items()},
            scale=got.get("scale"),
            initial_state=state if state is None or bounds is None else state[n : n + 1],
            delta=op in DELTA,
            state_v_first=bool(got.get("state_v_first")),
            dtype=torch.float64,
        )
        results.append((turn(o), final))
    outputs, states = zip(*results, strict=True)
    return torch.cat(outputs, 1), torch.cat(states)


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


def gradients(op: str, call: Arguments) -> dict[str, torch.Tensor]:
    call, leaves = leaves_of(call)
    results = run(op, call)
    torch.autograd.backward([x for x in results if x is not None], test_variants.starts_of(results))
    return {name: x.grad for name, x in leaves.items()}


def expected_gradients(op: str, call: Arguments) -> dict[str, torch.Tensor]:
    starts = [x.double() for x in test_variants.starts_of(run(op, call))]
    _, leaves = leaves_of({name: x.double() if isinstance(x, torch.Tensor) else x for name, x in call.items()})
    results = expected(op, {**call, **leaves})[: len(starts)]
    grads = torch.autograd.grad(results, list(leaves.values()), starts, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def check_gradients(op: str, call: Arguments) -> None:
    got, want = gradients(op, call), expected_gradients(op, call)
    for name, x in got.items():
        assert x.dtype == call[name].dtype, name
        assert_accurate(f"d{name}", x, want[name], DECAY_GRADIENT_NMSE if name.startswith("g") else GRADIENT_NMSE)


# --- forward ------------------------------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn, op: str, cases: tuple[str, ...] = CASES, longest: int = 300) -> Arguments:
    """Any legal call of moderate size."""
    bounds = None
    if draw(st.booleans()):
        bounds = [0]
        for piece in draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 15, 31, 32, 33, 64, 65]), min_size=1, max_size=5)):
            bounds.append(min(bounds[-1] + piece, longest))
    H, HV = draw(st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]))
    options: Arguments = {"scale": 0.3} if draw(st.booleans()) else {}
    if op in REVERSIBLE and draw(st.booleans()):
        options["reverse"] = True
    return make_call(
        op,
        draw(st.sampled_from(cases)),
        B=draw(st.sampled_from([1, 2])),
        T=min(longest, draw(st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65, 130, 200]))),
        H=H,
        HV=HV,
        K=draw(st.sampled_from([1, 12, 16, 60, 96])),
        V=draw(st.sampled_from([1, 12, 16, 60, 100])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16])),
        seed=draw(st.integers(0, 9)),
        bounds=bounds,
        state=draw(st.booleans()),
        l2norm=op in DELTA and draw(st.booleans()),
        by_channel=draw(st.integers(0, 3)) == 0,
        decay=draw(st.sampled_from(["per token", "per token", "constant", "none"])),
        v_first=draw(st.booleans()),
        **{**options, "output_final_state": draw(st.integers(0, 4)) > 0},
    )


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=20)
@given(data=st.data())
def test_any_call(op: str, data: st.DataObject):
    check(op, data.draw(calls(op)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_input(op: str, case: str):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(op, make_call(op, case, B=2, T=100, K=24, V=20, dtype=dtype))


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_size_of_the_delta_rule(chunk_size: int):
    check("chunk_delta_rule", make_call("chunk_delta_rule", T=130, chunk_size=chunk_size))


def test_the_delta_rule_is_the_gated_one_without_a_decay():
    call = make_call("chunk_delta_rule", T=100, l2norm=True)
    want = ops.chunk_gated_delta_rule(**call, g=torch.zeros(1, 100, 4))
    assert all(nmse(x, y) < 1e-13 for x, y in zip(run("chunk_delta_rule", call), want, strict=True))


def test_beta_of_one():
    call = make_call("fused_recurrent_delta_rule", beta=None)
    check("fused_recurrent_delta_rule", call)
    ones = {**call, "beta": torch.ones(1, 70, 4)}
    assert all(map(torch.equal, run("fused_recurrent_delta_rule", call), run("fused_recurrent_delta_rule", ones)))


@pytest.mark.parametrize("chunk_size", [None, 1, 16, 32, 64, 128, 512])
def test_chunk_size_of_simple_gla(chunk_size: int | None):
    """Any power of two; decays that forget and ones that keep, side by side, are as exact in the largest."""
    for case in ("ordinary", "sudden decay"):
        check("chunk_simple_gla", make_call("chunk_simple_gla", case, T=300, chunk_size=chunk_size))


@pytest.mark.parametrize("op", REVERSIBLE)
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("bounds", [None, [0, 0, 3, 40, 40]])
def test_reverse(op: str, T: int, bounds: list[int] | None):
    """Each sequence from its last token to its first; the state comes in after the last one."""
    for options in ({"v_first": True}, {"by_channel": True}, {"decay": "constant"}, {"decay": "none", "state": False}):
        call = make_call(op, T=T, bounds=bounds, reverse=True, **options)
        check(op, call)
        check_gradients(op, call)


@pytest.mark.parametrize("op", SIMPLE)
def test_constant_decay(op: str):
    """A decay for all tokens is that decay at every token, its gradient the sum of theirs."""
    call = make_call(op, T=100, decay="constant")
    check(op, call)
    check_gradients(op, call)


@pytest.mark.parametrize("op", REVERSIBLE)
def test_the_old_name_of_the_layout(op: str):
    call = make_call(op, v_first=True)
    want = run(op, call)
    call["transpose_state_layout"] = call.pop("state_v_first")
    with pytest.warns(DeprecationWarning, match="use `state_v_first`"):
        got = run(op, call)
    assert all(map(torch.equal, got, want))


def test_equal_decays_of_all_channels_are_one_per_head():
    call = make_call("chunk_simple_gla", T=100)
    g = call.pop("g")
    got = run("chunk_gla", {**call, "g": g[..., None].expand(-1, -1, -1, 16)})
    assert all(nmse(x, y) < 1e-11 for x, y in zip(got, run("chunk_simple_gla", {**call, "g": g}), strict=True))


@pytest.mark.parametrize("op", ["chunk_simple_gla", "chunk_gla"])
@pytest.mark.parametrize("case", ["ordinary", "no decay"])
def test_long_sequences_do_not_drift(op: str, case: str):
    check(op, make_call(op, case, T=4000, H=1, HV=1, K=8, V=4))


@pytest.mark.parametrize("g", [-20.0, -1000.0, float("-inf")])
@pytest.mark.parametrize("op", ["chunk_simple_gla", "chunk_gla"])
def test_a_state_that_is_forgotten_at_once(op: str, g: float):
    """Every token sees itself alone, and the gradients of decays are 0, not NaN."""
    call = make_call(op, T=100)
    call["g"] = torch.full_like(call["g"], g)
    scores = (call["q"] * call["k"]).sum(-1).repeat_interleave(2, dim=2) * 16**-0.5
    assert_accurate("o", run(op, call)[0], scores[..., None].double() * call["v"].double(), bound=1e-7)
    got = gradients(op, call)
    assert all(x.isfinite().all() for x in got.values()) and got["g"].abs().max() < 1e-6


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cuts", [[1, 2, 3], [32], [69], [21, 40]])
def test_pieces_equal_one_pass(op: str, cuts: list[int]):
    """Prefill and decoding: one call after the other, with the state in between."""
    call = make_call(op, B=2)
    outputs, state = [], call["initial_state"]
    for a, b in pairwise([0, *cuts, 70]):
        piece = {name: call[name][:, a:b] for name in PER_TOKEN if name in call}
        o, state = run(op, {**call, **piece, "initial_state": state})
        outputs.append(o)
    for x, y in zip((torch.cat(outputs, 1), state), expected(op, call), strict=True):
        assert_accurate("pieces", x, y)


@pytest.mark.parametrize("op", OPS)
def test_float64_is_computed_in_float64(op: str):
    """Up to the digits of FLA's float32 constant for 1 / ln 2."""
    call = make_call(op, T=100, dtype=torch.float64)
    for x, y in zip(run(op, call), expected(op, call), strict=True):
        assert x.dtype == torch.float64 and nmse(x, y) < 1e-15


@pytest.mark.parametrize("op", OPS)
def test_arguments_are_not_written_to(op: str):
    call = make_call(op, "time fastest", T=100)
    before = {name: call[name].clone() for name in INPUTS if name in call}
    gradients(op, call)
    assert all(torch.equal(call[name], x) for name, x in before.items())


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=10)
@given(data=st.data())
def test_gradients_of_any_call(op: str, data: st.DataObject):
    cases = tuple(case for case in CASES if case != "equal keys")
    call = data.draw(calls(op, cases, longest=130))
    assume(call["q"].shape[1] > 0 and call["q"].shape[-1] > 1)  # a norm of one channel has a gradient of rounding alone
    check_gradients(op, call)


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_hand_the_gradient_through(op: str):
    call = make_call(op, T=0)
    got = gradients(op, call)
    start = test_variants.starts_of((torch.empty(1, 0, 4, 12), torch.empty(1, 4, 16, 12)))[1]
    assert torch.equal(got["initial_state"], start)


@pytest.mark.parametrize("op", OPS)
def test_numerical_gradients(op: str):
    """By finite differences in float64."""
    call, leaves = leaves_of(make_call(op, T=70, H=1, HV=2, K=3, V=2, dtype=torch.float64))

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return run(op, {**call, **dict(zip(leaves, tensors, strict=True))})

    # The seventh digit is that of FLA's float32 constant for 1 / ln 2.
    assert torch.autograd.gradcheck(function, tuple(leaves.values()), rtol=1e-5, atol=1e-6, fast_mode=True)


# --- implementations, graphs --------------------------------------------------------------------------------------


def test_every_op_without_kernels_is_tested():
    assert {*OPS, *test_variants.OPS} == set(dispatch.WITHOUT_KERNELS)


@pytest.mark.parametrize("op", OPS)
def test_implementations(op: str):
    assert explain(op).implementation == "eager"
    choice = explain(op, "npu", chip="910B3")
    assert choice.implementation == "eager" and "there are no kernels for" in choice.reason
    call = make_call(op, bounds=[0, 1, 1, 40])
    with use_implementation("reference"):
        for x, y in zip(run(op, call), expected(op, call), strict=True):
            assert_accurate("reference", x, y)
    with use_implementation("triton"), pytest.raises(ImplementationError, match="there are no kernels for"):
        run(op, call)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("fused_recurrent_delta_rule", {"output_final_state": False, "state": False}),
        ("chunk_simple_gla", {"decay": "constant", "v_first": True}),
        ("fused_recurrent_simple_gla", {"bounds": [0, 1, 1, 40], "reverse": True}),
        ("chunk_gla", {"output_final_state": False, "state": False}),
        ("fused_recurrent_gla", {"decay": "none", "reverse": True, "v_first": True}),
        ("chunk_retention", {"decay": "none"}),
    ],
)
def test_in_a_graph(op: str, options: Arguments):
    torch.compiler.reset()
    call = make_call(op, **options)

    def model(call: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, state = run(op, {**call, "v": call["v"] * 2})
        return o + 1, state

    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for x, y in zip(fast(call), model(call), strict=True):
        assert (x is None and y is None) or (torch.equal(x, y) and x.stride() == y.stride())
    grads = []
    for function in (fast, model):
        leafy, leaves = leaves_of(call)
        results = function(leafy)
        torch.autograd.backward([x for x in results if x is not None], test_variants.starts_of(results))
        grads.append({name: x.grad for name, x in leaves.items()})
    assert all(torch.equal(grads[1][name], x) for name, x in grads[0].items())


@pytest.mark.parametrize("op", BY_CHANNEL)
def test_by_channel_in_a_graph(op: str):
    """Forward as ever; backward only outside of a graph, where autograd walks the token loop."""
    torch.compiler.reset()
    for T in (1, 5):
        call = make_call(op, T=T, by_channel=True)
        check_gradients(op, call)
    fast = torch.compile(lambda call: run(op, call), fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(call)[0], run(op, call)[0])
    with pytest.raises(NotImplementedError, match=r"per value channel.* no backward pass under torch\.compile"):
        fast(leaves_of(call)[0])[0].sum().backward()


def test_library():
    taken: list[Any] = []

    def take(*args: Any) -> tuple[None, None]:
        taken.extend(args)
        return None, None

    call, _ = leaves_of(make_call("chunk_gla", T=40, B=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "delta_rule", take)
        library.traced("chunk_gla", call)
    torch.library.opcheck(library.delta_rule, tuple(taken))


@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_nothing(op: str):
    call = make_call(op, T=100, dtype=torch.bfloat16)
    want, want_grads = run(op, call), gradients(op, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, grads = run(op, call), gradients(op, call)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert all(torch.equal(grads[name], x) for name, x in want_grads.items())


# --- FLA's reference names ----------------------------------------------------------------------------------------


def test_naive_delta_rule():
    call = make_call("chunk_delta_rule", H=2, HV=2, dtype=torch.float16)
    heads_first = [call[name].transpose(1, 2) for name in ("q", "k", "v", "beta")]
    want_o, want_state = expected("chunk_delta_rule", call)
    o, state = delta_naive.delta_rule_recurrence(*heads_first, initial_state=call["initial_state"])
    assert_accurate("o", o.transpose(1, 2), want_o)
    assert o.dtype == torch.float16 and state is not None
    assert_accurate("state", state, want_state)
    assert delta_naive.delta_rule_recurrence(*heads_first, output_final_state=False)[1] is None
    del call["initial_state"]
    want_o, want_state = expected("chunk_delta_rule", call)
    o, state = delta_naive.delta_rule_chunkwise(*heads_first)
    assert_accurate("o", o.transpose(1, 2), want_o)
    assert_accurate("state", state, want_state)
    o, A = delta_naive.delta_rule_parallel(*heads_first)
    assert_accurate("o", o.transpose(1, 2), want_o)
    _, _, v, beta = (x.float() for x in heads_first)
    assert_accurate("o", A @ (beta[..., None] * v), want_o.transpose(1, 2))


@pytest.mark.parametrize("decay", ["per token", "none"])
def test_naive_simple_gla(decay: str):
    call = make_call("chunk_simple_gla", dtype=torch.float16, decay=decay)
    del call["output_final_state"]
    call.setdefault("g", None)
    want = expected("chunk_simple_gla", {**call, "scale": 0.3})
    o, state = simple_naive.naive_recurrent_simple_gla(**call, scale=0.3)
    assert o.dtype == torch.float16
    for x, y in zip((o, state), want, strict=True):
        assert_accurate("naive", x, y)
    for x, y in zip(simple_naive.naive_chunk_simple_gla(**call, scale=0.3, output_final_state=True), want, strict=True):
        assert x.dtype == torch.float32
        assert_accurate("naive", x, y)
    del call["initial_state"]
    want_o, _ = expected("chunk_simple_gla", call)
    assert simple_naive.naive_recurrent_simple_gla(**call, output_final_state=False)[1] is None
    assert simple_naive.naive_chunk_simple_gla(**call)[1] is None
    assert_accurate("o", simple_naive.naive_parallel_simple_gla(**call)[0], want_o)


def test_naive_gla():
    call = make_call("fused_recurrent_gla", dtype=torch.bfloat16)
    o, state = naive_recurrent_gla(**call)
    assert o.dtype == torch.bfloat16
    for x, y in zip((o, state), expected("fused_recurrent_gla", call), strict=True):
        assert_accurate("naive", x, y)
    assert naive_recurrent_gla(**{**call, "output_final_state": False})[1] is None


def test_given_up_names():
    with pytest.raises(NotImplementedError, match="use chunk_delta_rule"):
        ops.fused_chunk_delta_rule(q=None)
    with pytest.raises(NotImplementedError, match="use chunk_gla"):
        ops.fused_chunk_gla(q=None)


# --- names of the same ops ----------------------------------------------------------------------------------------


def retention_call(**options: Any) -> tuple[Arguments, Arguments]:
    """A call of retention, and what it is as one of simple GLA."""
    call = make_call("chunk_simple_gla", decay="none", **options)
    decay = (1 - 2.0 ** (-5 - torch.arange(call["v"].shape[2], dtype=torch.float64))).log()
    return call, {**call, "g_gamma": decay}


@pytest.mark.parametrize("options", [{"T": 300}, {"bounds": [0, 1, 1, 40]}, {"T": 1}, {"H": 24, "HV": 24, "K": 4}])
def test_retention(options: Arguments):
    """From the 20th head on, a decay that is rounded in float32 before its logarithm is none."""
    call, simple = retention_call(**options)
    want = expected("chunk_simple_gla", simple)
    for op in (ops.chunk_retention, ops.fused_chunk_retention, ops.fused_recurrent_retention):
        for x, y in zip(op(**call), want, strict=True):
            assert_accurate(op.__name__, x, y)
    assert_accurate("small chunks", ops.chunk_retention(**call, chunk_size=16)[0], want[0])


def test_retention_in_reverse_with_gradients():
    call, simple = retention_call(v_first=True, bounds=[0, 1, 1, 40])
    call["reverse"] = simple["reverse"] = True
    want = expected("fused_recurrent_simple_gla", simple)
    leafy, leaves = leaves_of(call)
    results = ops.fused_recurrent_retention(**leafy)
    for x, y in zip(results, want, strict=True):
        assert_accurate("reverse", x, y)
    starts = test_variants.starts_of(results)
    torch.autograd.backward(results, starts)
    grads = expected_gradients("fused_recurrent_simple_gla", simple)
    for name, x in leaves.items():
        assert_accurate(f"d{name}", x.grad, grads[name], GRADIENT_NMSE)


def test_decay_of_retention():
    exact = torch.log1p(-torch.exp2(-5 - torch.arange(40, dtype=torch.float64)))
    assert torch.equal(retention_decay(40, torch.empty(0, dtype=torch.float64)), exact)
    got = retention_decay(40, torch.empty(0, dtype=torch.bfloat16))
    assert got.dtype == torch.float32 and ((got - exact) / exact).abs().max() < 2e-7


def test_naive_retention():
    call, simple = retention_call(dtype=torch.float16)
    del call["initial_state"], simple["initial_state"]
    o = naive_retention(*(call[name].transpose(1, 2) for name in ("q", "k", "v")))
    assert o.dtype == torch.float16
    assert_accurate("o", o.transpose(1, 2), expected("chunk_simple_gla", simple)[0])


def test_fused_chunk_simple_gla():
    for decay in ("per token", "constant", "none"):
        call = make_call("chunk_simple_gla", decay=decay, scale=0.3)
        assert all(map(torch.equal, ops.fused_chunk_simple_gla(**call), ops.chunk_simple_gla(**call)))


@pytest.mark.parametrize("decay", ["per token", "none"])
def test_parallel_simple_gla(decay: str):
    call = make_call("chunk_simple_gla", "sudden decay", B=2, T=100, decay=decay, state=False, scale=0.3)
    del call["output_final_state"]
    want_o, _ = expected("chunk_simple_gla", call)
    o, nothing = ops.parallel_simple_gla(**call)
    assert_accurate("o", o, want_o)
    assert nothing is None
    o, scores = ops.parallel_simple_gla(**call, output_attentions=True)
    assert scores is not None and scores.shape == (2, 4, 100, 100) and scores.dtype == call["q"].dtype
    assert not scores.triu(1).any()
    assert_accurate("scores", (scores.double() @ call["v"].double().transpose(1, 2)).transpose(1, 2), want_o)
    bounds = torch.tensor([0, 30, 100])
    packed = {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    assert_accurate(
        "packed",
        ops.parallel_simple_gla(**packed, cu_seqlens=bounds, cu_seqlens_cpu=bounds)[0],
        expected("chunk_simple_gla", {**packed, "cu_seqlens": bounds})[0],
    )
    with pytest.raises(AssertionError, match="cu_seqlens must be None"):
        ops.parallel_simple_gla(**packed, cu_seqlens=bounds, output_attentions=True)


def test_scores_are_as_exact_as_outputs():
    call = make_call("chunk_simple_gla", T=50, state=False)
    del call["output_final_state"]
    _, want = ops.parallel_simple_gla(**call, output_attentions=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, scores = ops.parallel_simple_gla(**call, output_attentions=True)
    assert torch.equal(scores, want)
    double = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    o, scores = ops.parallel_simple_gla(**double, output_attentions=True)
    assert_accurate("scores", (scores @ double["v"].transpose(1, 2)).transpose(1, 2), o, 1e-28)


def test_parallel_retention():
    call, simple = retention_call(state=False)
    del call["output_final_state"]
    o, scores = ops.parallel_retention(**call, output_attentions=True)
    assert_accurate("o", o, expected("chunk_simple_gla", simple)[0])
    assert scores is not None and scores.shape == (1, 4, 70, 70)
    assert ops.parallel_retention(**call)[1] is None


# --- refusals -----------------------------------------------------------------------------------------------------

ANY_BAD = [
    ({"k": torch.zeros(1, 69, 2, 16)}, ShapeError, r"q and k must have the same shape"),
    ({"v": torch.zeros(1, 70, 3, 12)}, ShapeError, r"HV=3\) must be evenly divisible by num_heads \(H=2\)"),
    ({"v": torch.zeros(1, 70, 4, 12).half()}, ShapeError, r"q, k and v must have one dtype"),
    ({"q": None}, TypeError, r"q must be a torch.Tensor, got NoneType None"),
    ({"cu_seqlens": torch.tensor([0, 30, 70])}, ValueError, r"number of initial states .* 2 rather than 1"),
    *[
        (
            {"cu_seqlens": torch.tensor([a, b])},
            ValueError,
            f"cu_seqlens must start at 0 and end at T=70, got {a} and {b}",
        )
        for a, b in ((0, 60), (1, 70), (2, 72))
    ],
    ({"initial_state": torch.zeros(1, 4, 12, 16)}, ShapeError, r"initial_state must have shape"),
    ({"scale": "1"}, TypeError, r"scale must be a number or None"),
]
SIMPLE_BAD = [
    ({"g": torch.zeros(1, 70, 2)}, ShapeError, r"g must have shape \[B, T, HV\]=\[1, 70, 4\]"),
    ({"g_gamma": torch.zeros(4)}, ValueError, r"g, one per token, or as g_gamma.*, not as both"),
    ({"g": None, "g_gamma": torch.zeros(2)}, ShapeError, r"g_gamma must have shape \[HV\]=\[4\]"),
    ({"g": None, "g_gamma": 0.5}, TypeError, r"g_gamma must be a torch.Tensor, got float 0.5"),
]
REFUSALS = [
    *[(op, *bad) for op in OPS for bad in ANY_BAD],
    *[(op, {"beta": torch.zeros(1, 70, 2)}, ShapeError, r"beta must have shape \[B, T, HV\]=") for op in DELTA],
    ("chunk_delta_rule", {"beta": torch.zeros(1, 70, 4, 12)}, ShapeError, r"beta must have shape \[B, T, HV\]="),
    ("chunk_delta_rule", {"chunk_size": 128}, ValueError, r"`chunk_size` must be 16, 32, or 64, got 128"),
    ("chunk_delta_rule", {"head_first": False}, DeprecationWarning, r"head_first has been removed"),
    ("fused_recurrent_delta_rule", {"scale": 0.0}, AssertionError, r"scale must be positive, got 0.0"),
    *[(op, *bad) for op in SIMPLE for bad in SIMPLE_BAD],
    *[
        ("chunk_simple_gla", {"chunk_size": n}, ValueError, r"`chunk_size` must be a power of 2")
        for n in (0, 48, 2.0, True)
    ],
    ("chunk_simple_gla", {"head_first": False}, DeprecationWarning, r"head_first has been removed"),
    ("chunk_gla", {"g": None}, TypeError, r"g must be a torch.Tensor, got NoneType None"),
    ("chunk_gla", {"g": torch.zeros(1, 70, 4)}, ShapeError, r"g must have shape \[B, T, HV, K\]=\[1, 70, 4, 16\]"),
    ("chunk_gla", {"initial_state": torch.zeros(1, 4, 16, 12).half()}, AssertionError, r"must be in float32"),
    ("fused_recurrent_gla", {"gk": torch.zeros(1, 70, 4)}, ShapeError, r"gk must have shape \[B, T, HV, K\]="),
    ("fused_recurrent_gla", {"gv": torch.zeros(1, 70, 4)}, ShapeError, r"gv must have shape \[B, T, HV, V\]="),
]


@pytest.mark.parametrize(("op", "wrong", "error", "message"), REFUSALS)
def test_refusals(op: str, wrong: Arguments, error: type[Exception], message: str):
    """In reverse, too: what is turned around is still what the message tells."""
    for direction in ({}, {"reverse": True}) if op in REVERSIBLE else ({},):
        with pytest.raises(error, match=message):
            run(op, {**make_call(op), **wrong, **direction})


@pytest.mark.parametrize("bounds", [torch.tensor([]), torch.tensor(70), torch.tensor([False, True]), [0, 70]])
def test_bad_bounds_in_reverse(bounds: Any):
    with pytest.raises((ShapeError, TypeError), match="cu_seqlens must be a"):
        run("fused_recurrent_gla", make_call("fused_recurrent_gla", reverse=True, cu_seqlens=bounds))


@pytest.mark.parametrize("op", ["chunk_delta_rule", *SIMPLE, "fused_recurrent_gla"])
def test_unknown_arguments_are_named(op: str):
    with pytest.warns(UserWarning, match=f"{op} ignores the argument `{op}_typo`"):
        run(op, {**make_call(op), f"{op}_typo": True})
