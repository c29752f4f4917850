"""Gradients of the chunked ops: numerically in float64, and against autograd through the token loop."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from fla_npu.ops.common.stages import FORGET
from fla_npu.testing import nmse
from tests.ops.calls import (
    CHUNKED,
    DECAY_GRADIENT_NMSE,
    GRADIENT_NMSE,
    RECURRENT,
    Arguments,
    assert_accurate,
    expected,
    make_call,
    run,
)

DECAYS = ("g", "A_log", "dt_bias")
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def leaves_of(call: Arguments, names: tuple[str, ...] = INPUTS) -> tuple[Arguments, dict[str, torch.Tensor]]:
    """The call with fresh leaves in the place of its differentiable tensors."""
    leaves = {name: call[name].detach().clone().requires_grad_() for name in names if name in call}
    return {**call, **leaves}, leaves


def weights(results: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
    """Gradients to start from, the same for the same shapes and dtypes."""
    return [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(x.dtype)
        for i, x in enumerate(results)
        if x is not None
    ]


def gradients(op: str, call: Arguments, names: tuple[str, ...] = INPUTS) -> dict[str, torch.Tensor]:
    call, leaves = leaves_of(call, names)
    results = run(op, call)
    torch.autograd.backward([x for x in results if x is not None], weights(results))
    return {name: x.grad for name, x in leaves.items()}


def expected_gradients(op: str, call: Arguments, names: tuple[str, ...] = INPUTS) -> dict[str, torch.Tensor]:
    """In float64, of the rounded inputs and of the rounded gradients of o."""
    with torch.no_grad():
        starts = [x.double() for x in weights(run(op, call))]
    leaves = {name: call[name].double().requires_grad_() for name in names if name in call}
    results = expected(op, {**call, **leaves})[: len(starts)]
    grads = torch.autograd.grad(results, list(leaves.values()), starts, allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(leaves.items(), grads, strict=True)
    }


def check_gradients(op: str, call: Arguments, ordinary: Arguments | None = None) -> None:
    """Args:
    ordinary: a call with gradients as large as the terms of which those of `call` are what is left. With equal keys
        each token erases what the ones before wrote, and gradients by decays and states almost vanish.
    """
    got, want = gradients(op, call), expected_gradients(op, call)
    terms = {} if ordinary is None else expected_gradients(op, ordinary)
    for name, x in got.items():
        assert x.dtype == call[name].dtype, name
        bound = DECAY_GRADIENT_NMSE if name in DECAYS else GRADIENT_NMSE
        assert_accurate(f"d{name}", x, want[name], bound, terms=terms.get(name))


SMALL = {"B": 1, "T": 5, "H": 1, "HV": 2, "K": 3, "V": 2}


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"B": 2, "T": 17, "chunk_size": 32, "K": 2, "V": 1},
        {"T": 35, "chunk_size": 32, "HV": 1, "K": 2, "V": 1},
        {"H": 2, "HV": 2, "l2norm": True},
        {"l2norm": True, "beta": "sigmoid", "scale": 0.7},
        {"gate": "softplus", "beta": "negative"},
        {"gate": "softplus without bias", "v_first": True},
        {"gate": "bounded"},
        {"gate": "bounded without A_log", "l2norm": True},
        {"v_first": True, "bounds": [0, 2, 2, 5]},
        {"bounds": [0, 2, 4, 5, 5], "gate": "softplus", "l2norm": True, "beta": "sigmoid"},
        {"HV": 3, "case": "equal keys"},
        {"case": "zero rows", "l2norm": True},
        {"state": False},
        {"output_final_state": False},
    ],
    ids=str,
)
def test_numerically(op: str, options: dict[str, Any]):
    """Central differences in float64 by every input, and of every result."""
    if "bounded" in options.get("gate", "") and op == "chunk_gdn":
        pytest.skip("KDA only")
    call = make_call(op, dtype=torch.float64, **{**SMALL, **options})
    # KDA wants float32 states: its gradient by the state is compared with the token loop below instead.
    names = tuple(name for name in INPUTS if name in call and call[name].dtype == torch.float64)
    call, leaves = leaves_of(call, names)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = run(op, {**call, **dict(zip(leaves, tensors, strict=True))})
        return tuple(x for x in results if x is not None)

    assert torch.autograd.gradcheck(function, list(leaves.values()))


@pytest.mark.parametrize("op", CHUNKED)
@settings(max_examples=15)
@given(data=st.data())
def test_any_call(op: str, data: st.DataObject):
    draw = data.draw
    gates = ["none", "none", "softplus"] + (["bounded", "bounded without A_log"] if op == "chunk_kda" else [])
    bounds = draw(st.sampled_from([None, None, [0, 30, 30, 60, 61, 190], [0, 0, 64, 128, 192], [0, 1, 2, 3, 70]]))
    K = draw(st.sampled_from([1, 12, 60, 100]))
    kind = draw(st.sampled_from(["ordinary", "equal keys", "zero rows", "beta to two", "time fastest", "no decay"]))
    make = partial(
        make_call,
        op,
        B=draw(st.integers(1, 2)),
        T=draw(st.sampled_from([1, 2, 63, 64, 65, 150, 200])),
        H=2,
        HV=draw(st.sampled_from([2, 4])),
        K=K,
        V=draw(st.sampled_from([1, 12, 96])),
        bounds=bounds,
        state=draw(st.booleans()),
        v_first=draw(st.booleans()),
        l2norm=K > 1 and draw(st.booleans()),  # a number divided by its size has no gradient but rounding
        gate=draw(st.sampled_from(gates)),
        beta=draw(st.sampled_from(["plain", "sigmoid", "negative"])),
        output_final_state=draw(st.booleans()),
        chunk_size=draw(st.sampled_from([32, 64])),
    )
    check_gradients(op, make(kind), make("ordinary") if kind == "equal keys" else None)


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_first", [False, True])
def test_dtypes(op: str, dtype: torch.dtype, v_first: bool):
    """Gradients have the dtypes of their inputs and no other rounding than to those."""
    options: Arguments = {"dtype": dtype, "v_first": v_first, "l2norm": True, "gate": "softplus", "beta": "sigmoid"}
    call = make_call(op, B=2, T=150, K=32, V=24, **options)
    check_gradients(op, call)
    call["A_log"], call["dt_bias"] = call["A_log"].bfloat16(), call["dt_bias"].bfloat16()
    if op == "chunk_gdn":
        call["initial_state"] = call["initial_state"].bfloat16()
    check_gradients(op, call)


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("total", [-1.0, -80.0, -320.0, -1280.0])
def test_strong_decays(op: str, total: float):
    call = make_call(op, T=150, K=32, V=32)
    uneven = torch.rand(call["g"].shape, generator=torch.Generator().manual_seed(0))
    weak = expected_gradients(op, {**call, "g": torch.full_like(uneven, -1 / 64)})["g"]
    for share in (torch.ones_like(uneven), 2 * uneven, uneven.sub(0.9).clamp_min(0) * 200):
        strong = {**call, "g": total / 64 * share}
        got, want = gradients(op, strong), expected_gradients(op, strong)
        # The gradient of a scalar decay is a difference of sums over the chunk. It vanishes with the decay, its terms
        # do not, so its error counts in proportion to what it is where decays are weak.
        assert (got["g"] - want["g"]).square().mean() < 1e-12 * weak.square().mean()
        for name in ("q", "k", "v", "beta", "initial_state"):
            assert_accurate(f"d{name}", got[name], want[name], GRADIENT_NMSE)
        if op == "chunk_kda":
            assert_accurate("dg", got["g"], want["g"], DECAY_GRADIENT_NMSE)


@pytest.mark.parametrize("op", CHUNKED)
def test_infinite_decays(op: str):
    """Finite gradients, those of a decay that forgets as thoroughly but has a derivative."""
    call = make_call(op, "sudden decay", T=150)
    got = gradients(op, call)
    want = expected_gradients(op, {**call, "g": call["g"].clamp_min(FORGET)})
    for name, x in got.items():
        assert_accurate(f"d{name}", x, want[name], DECAY_GRADIENT_NMSE if name in DECAYS else GRADIENT_NMSE)


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("state", ["ordinary", "huge values", "equal keys"])
def test_adversaries(op: str, state: str):
    check_gradients(op, make_call(op, state, T=300, K=32, V=32))


def test_channel_decays_by_levels_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fla_npu.ops.common.stages.REACH", -1.0)
    check_gradients("chunk_kda", make_call("chunk_kda", T=150))
    check_gradients("chunk_kda", make_call("chunk_kda", bounds=[0, 3, 6, 50, 50, 51], v_first=True))


@pytest.mark.parametrize("op", CHUNKED)
def test_no_matter_how_many_sequences_are_taken_together(op: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fla_npu.ops.common.prepare.runs.__defaults__", (300,))
    for options in ({"B": 5, "T": 70}, {"bounds": [0, 20, 40, 60, 80, 100, 100, 101, 102, 103]}):
        for kept in ({}, {"disable_recompute": True} if op == "chunk_kda" else {}):
            check_gradients(op, make_call(op, gate="softplus", **options, **kept))


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("v_first", [False, True])
def test_sequences_without_tokens_hand_the_gradient_through(op: str, v_first: bool):
    call, leaves = leaves_of(make_call(op, bounds=[0, 0, 40, 40], v_first=v_first))
    o, state = run(op, call)
    d_state = torch.randn(state.shape, generator=torch.Generator().manual_seed(0))
    torch.autograd.backward([o, state], [torch.ones_like(o), d_state])
    d_initial = leaves["initial_state"].grad
    assert torch.equal(d_initial[[0, 2]], d_state[[0, 2]]) and not torch.equal(d_initial[1], d_state[1])

    call, leaves = leaves_of(make_call(op, bounds=[0, 0, 40, 40], v_first=v_first))
    run(op, call)[0].sum().backward()
    assert not leaves["initial_state"].grad[[0, 2]].any() and leaves["initial_state"].grad[1].any()


@pytest.mark.parametrize("op", CHUNKED)
def test_no_tokens_at_all(op: str):
    call, leaves = leaves_of(make_call(op, T=0))
    o, state = run(op, call)
    torch.autograd.backward([o, state], [torch.ones_like(o), 3 * torch.ones_like(state)])
    assert torch.equal(leaves["initial_state"].grad, torch.full((1, 4, 16, 12), 3.0))
    assert all(leaves[name].grad.shape == call[name].shape for name in leaves)


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("used", ["o", "state"])
def test_only_one_result_is_used(op: str, used: str):
    call, leaves = leaves_of(make_call(op, T=100))
    o, state = run(op, call)
    (o if used == "o" else state).sum().backward()
    double = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    want_o, want_state = expected(op, {**call, **double})
    (want_o if used == "o" else want_state).sum().backward()
    for name, x in leaves.items():
        want = double[name].grad
        want = torch.zeros_like(double[name]) if want is None else want
        assert_accurate(f"d{name}", x.grad, want, DECAY_GRADIENT_NMSE if name in DECAYS else GRADIENT_NMSE)


@pytest.mark.parametrize("op", CHUNKED)
def test_any_part_may_require_gradients(op: str):
    """One input alone gets what it gets among the others, and its neighbours get none."""
    call = make_call(op, T=70, gate="softplus", beta="sigmoid", l2norm=True)
    everything = gradients(op, call)
    for name in everything:
        assert torch.equal(gradients(op, call, (name,))[name], everything[name]), name


@pytest.mark.parametrize("op", CHUNKED)
def test_without_gradients_nothing_is_attached(op: str):
    assert run(op, make_call(op))[0].grad_fn is None
    call, _ = leaves_of(make_call(op))
    with torch.no_grad():
        assert not run(op, call)[0].requires_grad
    o, state = run(op, {**call, "output_final_state": False})
    assert o.requires_grad and state is None


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("v_first", [False, True])
def test_gradients_do_not_depend_on_strides(op: str, v_first: bool):
    """Also a gradient of o that is a view: sum() hands in an expanded one."""
    call = make_call(op, T=70, v_first=v_first)
    want = gradients(op, call)
    strided, leaves = leaves_of(
        {name: x.transpose(1, 2).contiguous().transpose(1, 2) if name in want else x for name, x in call.items()}
    )
    results = run(op, strided)
    starts = [x.mT.contiguous().mT for x in weights(results)]
    torch.autograd.backward(results, starts)
    for name, x in leaves.items():
        assert nmse(x.grad, want[name]) < 1e-12

    call, leaves = leaves_of(make_call(op, T=70))
    run(op, call)[0].sum().backward()
    summed = {name: x.grad for name, x in leaves.items()}
    call, leaves = leaves_of(call)
    o, _ = run(op, call)
    o.backward(torch.ones_like(o))
    for name, x in leaves.items():
        assert torch.equal(x.grad, summed[name])


@pytest.mark.parametrize("options", [{"T": 200}, {"B": 3, "T": 70}, {"bounds": [0, 0, 64, 128, 129, 200]}], ids=str)
def test_keeping_states_changes_nothing(options: dict[str, Any]):
    call = make_call("chunk_kda", gate="bounded", l2norm=True, **options)
    want = gradients("chunk_kda", call)
    for name, x in gradients("chunk_kda", {**call, "disable_recompute": True}).items():
        assert torch.equal(x, want[name]), name


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("keep", [False, True])
def test_backward_twice_through_a_retained_graph(op: str, keep: bool):
    options = {"disable_recompute": True} if keep and op == "chunk_kda" else {}
    call, leaves = leaves_of(make_call(op, T=150, **options))
    o, state = run(op, call)
    starts = weights((o, state))
    first = torch.autograd.grad((o, state), list(leaves.values()), starts, retain_graph=True)
    second = torch.autograd.grad((o, state), list(leaves.values()), starts)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("power", [1, 2])
def test_double_backward_is_refused(op: str, power: int):
    """Of a loss that is linear in o, too: its gradients are no constants."""
    call, leaves = leaves_of(make_call(op))
    o, _ = run(op, call)
    (dq,) = torch.autograd.grad(o.pow(power).sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="an op of fla_npu has no second derivatives"):
        dq.sum().backward()


@pytest.mark.parametrize("op", CHUNKED)
def test_second_derivatives_of_functions_are_refused(op: str):
    call = make_call(op)
    q = call.pop("q")

    def first(q: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: run(op, {**call, "q": x})[0].sum())(q).sum()

    with pytest.raises(RuntimeError, match="an op of fla_npu has no second derivatives"):
        torch.func.grad(first)(q)


@pytest.mark.parametrize("op", RECURRENT)
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("result", [0, 1])
def test_recurrent_ops_refuse_the_backward_pass(op: str, T: int, result: int):
    call, _ = leaves_of(make_call(op, T=T))
    x = run(op, call)[result]
    assert x.requires_grad
    with pytest.raises(NotImplementedError, match="no backward pass: train through"):
        x.sum().backward()


@pytest.mark.parametrize("rare", ["gv", "gk", "beta"])
def test_so_do_their_rare_arguments(rare: str):
    """Token by token there could be a backward pass, but whether a model trains must not depend on that."""
    call, _ = leaves_of(make_call("fused_recurrent_gdn", T=5))
    last = (16,) if rare == "gk" else (12,)
    call[rare] = -torch.rand(*call["v"].shape[:3], *last, generator=torch.Generator().manual_seed(0))
    o, state = run("fused_recurrent_gdn", call)
    for x in (o, state):
        with pytest.raises(NotImplementedError, match="no backward pass: train through"):
            x.sum().backward(retain_graph=True)


@pytest.mark.parametrize("op", CHUNKED)
def test_saved_tensors_are_watched_and_left_alone(op: str):
    """Changing an input between the passes is an error, as everywhere in autograd; the passes themselves do not."""
    call, leaves = leaves_of(make_call(op, gate="softplus", l2norm=True))
    before = {name: (x.detach().clone(), x._version) for name, x in leaves.items()}
    run(op, call)[0].sum().backward()
    for name, x in leaves.items():
        assert torch.equal(x, before[name][0]) and x._version == before[name][1]

    for name in ("q", "initial_state"):
        call, leaves = leaves_of(make_call(op))
        o, _ = run(op, call)
        with torch.no_grad():
            leaves[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(op: str, reentrant: bool):
    call = make_call(op, T=150)
    want = gradients(op, call)
    call, leaves = leaves_of(call)
    names = list(leaves)

    def block(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return run(op, {**call, **dict(zip(names, tensors, strict=True))})

    results = checkpoint(block, *leaves.values(), use_reentrant=reentrant)
    torch.autograd.backward(results, weights(results))
    for name, x in leaves.items():
        assert torch.equal(x.grad, want[name])


@pytest.mark.parametrize("op", CHUNKED)
def test_functional_transforms(op: str):
    call = make_call(op, T=100)
    want = gradients(op, call)
    names = [name for name in INPUTS if name in call]

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return run(op, {**call, **dict(zip(names, tensors, strict=True))})

    tensors = [call[name] for name in names]
    results, vjp = torch.func.vjp(function, *tensors)
    for name, x in zip(names, vjp(tuple(weights(results))), strict=True):
        assert torch.equal(x, want[name]), name

    by_all = torch.func.grad(lambda *x: function(*x)[0].square().sum(), argnums=tuple(range(len(names))))(*tensors)
    call, leaves = leaves_of(call)
    run(op, call)[0].square().sum().backward()
    for name, x in zip(names, by_all, strict=True):
        assert torch.equal(x, leaves[name].grad), name


@pytest.mark.parametrize("op", CHUNKED)
def test_inference_mode_before_training(op: str):
    """Constants that a call leaves behind for the next must not be inference tensors in a graph."""
    call = make_call(op, T=37)  # a chunk length that no other test has
    with torch.inference_mode():
        o, state = run(op, call)
    assert o.is_inference()
    o2, state2 = run(op, call)
    assert torch.equal(o, o2) and torch.equal(state, state2)
    check_gradients(op, call)


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(op: str, dtype: torch.dtype):
    call = make_call(op, T=100, dtype=dtype, gate="softplus", l2norm=True)
    want, want_grads = run(op, call), gradients(op, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, grads = run(op, call), gradients(op, call)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(got, want, strict=True))
    assert all(torch.equal(grads[name], x) for name, x in want_grads.items())


@pytest.mark.parametrize("op", CHUNKED)
def test_gradient_through_pieces_is_that_of_the_whole(op: str):
    """Truncated training hands states over; without truncation the gradient must not know of the cut."""
    call = make_call(op, T=150)
    want = gradients(op, call)
    cut, leaves = leaves_of(call)
    per_token = ("q", "k", "v", "g", "beta")
    first = {name: x[:, :70] if name in per_token else x for name, x in cut.items()}
    second = {name: x[:, 70:] if name in per_token else x for name, x in cut.items()}
    o1, middle = run(op, first)
    o2, state = run(op, {**second, "initial_state": middle})
    results = torch.cat((o1, o2), 1), state
    torch.autograd.backward(results, weights(results))
    for name, x in leaves.items():
        assert_accurate(f"d{name}", x.grad, want[name], DECAY_GRADIENT_NMSE if name in DECAYS else GRADIENT_NMSE)
