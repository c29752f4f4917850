"""The token loop and the chunk form against formulas written differently, each other, and their own derivatives."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.ops.common.chunk_form import delta_chunk_form
from fla_npu.ops.common.recurrence import delta_recurrence, packed_delta_recurrence
from fla_npu.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from fla_npu.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
from fla_npu.testing import CASES, make_inputs, nmse, reference

F64 = torch.float64


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def call(B: int = 2, T: int = 5, H: int = 1, HV: int = 2, K: int = 3, V: int = 4) -> dict[str, torch.Tensor]:
    """Every argument of the recurrence that is a tensor, in float64."""
    return {
        "q": random(B, T, H, K),
        "k": torch.nn.functional.normalize(random(B, T, H, K, seed=1), dim=-1),
        "v": random(B, T, HV, V),
        "beta": random(B, T, HV).sigmoid(),
        "g": -random(B, T, HV, seed=1).abs(),
        "gk": -random(B, T, HV, K).abs(),
        "gv": -random(B, T, HV, V, seed=1).abs(),
        "initial_state": random(B, HV, K, V),
    }


def assert_equal_results(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("decays", [(), ("g",), ("gk",), ("g", "gk", "gv")], ids="-".join)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_against_transition_matrices(decays: tuple[str, ...], state_v_first: bool):
    """`S <- (I - beta k k^T) D S E + beta k v^T`, one head and one matrix at a time."""
    made = call(H=2, HV=4)
    used = {name: made[name] for name in decays}
    q, k, v, beta, S0 = (made[name] for name in ("q", "k", "v", "beta", "initial_state"))
    given_state = S0.mT if state_v_first else S0
    o, state = delta_recurrence(
        q, k, v, beta=beta, scale=0.7, initial_state=given_state, state_v_first=state_v_first, dtype=F64, **used
    )
    for b in range(2):
        for j in range(4):
            S, h = S0[b, j], j // 2
            for t in range(5):
                key, b_t = k[b, t, h], beta[b, t, j]
                if "g" in used:
                    S = S * made["g"][b, t, j].exp()
                if "gk" in used:
                    S = torch.diag(made["gk"][b, t, j].exp()) @ S
                if "gv" in used:
                    S = S @ torch.diag(made["gv"][b, t, j].exp())
                S = (torch.eye(3, dtype=F64) - b_t * torch.outer(key, key)) @ S + b_t * torch.outer(key, v[b, t, j])
                torch.testing.assert_close(o[b, t, j], 0.7 * S.T @ q[b, t, h])
            torch.testing.assert_close(state[b, j], S.T if state_v_first else S)


def test_without_delta_rule_it_is_decayed_attention():
    """`o_t = scale sum_{s <= t} (q_t exp(sum of gk after s) . k_s) beta_s v_s`."""
    made = call(H=2)
    q, k, v, gk = (made[name] for name in ("q", "k", "v", "gk"))
    beta = random(2, 5, 2, 4).sigmoid()
    o, _ = delta_recurrence(q, k, v, beta=beta, gk=gk, delta=False, dtype=F64)
    for t in range(5):
        want = torch.zeros_like(v[:, 0])
        for s in range(t + 1):
            decay = gk[:, s + 1 : t + 1].sum(1).exp()
            want += (q[:, t] * decay * k[:, s]).sum(-1, keepdim=True) * 3**-0.5 * beta[:, s] * v[:, s]
        torch.testing.assert_close(o[:, t], want)


def test_orthogonal_keys_are_a_dictionary():
    """With beta = 1 and no decay, reading a key returns the value last stored under it."""
    k = torch.eye(3, dtype=F64)[[0, 1, 2, 1]].view(1, 4, 1, 3)
    v = random(1, 4, 1, 2)
    q = torch.eye(3, dtype=F64)[[0, 0, 1, 1]].view(1, 4, 1, 3)
    o, _ = delta_recurrence(q, k, v, scale=1.0, dtype=F64)
    torch.testing.assert_close(o[0, :, 0], v[0, [0, 0, 1, 3], 0])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_chunk_form_is_the_recurrence(case: str, channel: bool, chunk_size: int):
    made = make_inputs(case, B=2, T=75, K=8, V=12, channel=channel)
    got = delta_chunk_form(
        made.q,
        made.k,
        made.v,
        beta=made.beta,
        g=made.g,
        initial_state=made.initial_state,
        chunk_size=chunk_size,
        dtype=F64,
    )
    assert all(nmse(x, y) < 1e-24 for x, y in zip(got, reference(made), strict=True))


@pytest.mark.parametrize("op", [delta_recurrence, delta_chunk_form])
@pytest.mark.parametrize("decay", ["g", "gk"])
def test_derivatives(op: Any, decay: str):
    made = call(B=1, T=3, K=2, V=2)
    tensors = [made[name].requires_grad_() for name in ("q", "k", "v", "beta", decay, "initial_state")]
    name = "g" if op is delta_chunk_form else decay

    def run(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"chunk_size": 2} if op is delta_chunk_form else {}
        return op(*x[:3], beta=x[3], initial_state=x[5], dtype=F64, **{name: x[4]}, **options)

    assert torch.autograd.gradcheck(run, tensors)


def test_derivatives_of_the_general_recurrence():
    made = call(B=1, T=3)
    made["beta"] = random(1, 3, 2, 4).sigmoid()
    names, tensors = list(made), [x.requires_grad_() for x in made.values()]

    def run(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(zip(names, x, strict=True))
        return delta_recurrence(named.pop("q"), named.pop("k"), named.pop("v"), dtype=F64, **named)

    assert torch.autograd.gradcheck(run, tensors)


def test_gradients_are_finite_after_infinite_decay():
    made = make_inputs("sudden decay", T=20, channel=True)
    leaves = [x.double().requires_grad_() for x in made]
    by_recurrence = torch.autograd.grad([x.sum() for x in reference(type(made)(*leaves))], leaves)
    by_chunks = delta_chunk_form(*leaves[:3], beta=leaves[4], g=leaves[3], initial_state=leaves[5], dtype=F64)
    assert all(x.isfinite().all() for x in by_recurrence)
    assert_equal_results(torch.autograd.grad([x.sum() for x in by_chunks], leaves), by_recurrence)


@settings(max_examples=25, deadline=None)
@given(T=st.integers(1, 9), cut=st.integers(0, 9), group=st.integers(1, 3), delta=st.booleans(), v_first=st.booleans())
def test_a_state_carries_over(T: int, cut: int, group: int, delta: bool, v_first: bool):
    """Two calls with the state handed over are one call, wherever the cut."""
    made = call(T=T, HV=group)
    state = made.pop("initial_state")
    state = state.mT if v_first else state
    options = {"delta": delta, "state_v_first": v_first, "dtype": F64}

    def run(tensors: dict[str, torch.Tensor], initial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rest = {name: x for name, x in tensors.items() if name not in ("q", "k", "v")}
        return delta_recurrence(tensors["q"], tensors["k"], tensors["v"], initial_state=initial, **rest, **options)

    first, middle = run({name: x[:, :cut] for name, x in made.items()}, state)
    second, last = run({name: x[:, cut:] for name, x in made.items()}, middle)
    assert_equal_results((torch.cat([first, second], 1), last), run(made, state))


def test_packed_sequences_are_separate():
    bounds = [0, 3, 3, 4, 9]
    made = call(B=1, T=9)
    state = random(4, 2, 3, 4)
    made.pop("initial_state")
    q, k, v = (made.pop(name) for name in ("q", "k", "v"))
    o, states = packed_delta_recurrence(q, k, v, cu_seqlens=bounds, initial_state=state, dtype=F64, **made)
    assert o.shape == (1, 9, 2, 4)
    for n, (a, b) in enumerate(pairwise(bounds)):
        cut = {name: x[:, a:b] for name, x in made.items()}
        want, last = delta_recurrence(q[:, a:b], k[:, a:b], v[:, a:b], initial_state=state[n : n + 1], dtype=F64, **cut)
        assert torch.equal(o[:, a:b], want) and torch.equal(states[n : n + 1], last)
    assert torch.equal(states[1], state[1])
    o, states = packed_delta_recurrence(q, k, v, cu_seqlens=bounds, dtype=F64, state_v_first=True, **made)
    assert states.shape == (4, 2, 4, 3) and not states[1].any()


@pytest.mark.parametrize("form", [delta_recurrence, delta_chunk_form])
def test_no_tokens(form: Any):
    made = call(T=0)
    q, k, v, beta, g, state = (made[name] for name in ("q", "k", "v", "beta", "g", "initial_state"))
    o, last = form(q, k, v, beta=beta, g=g, initial_state=state, dtype=F64)
    assert o.shape == (2, 0, 2, 4) and torch.equal(last, state)
    assert last.data_ptr() != state.data_ptr()


@pytest.mark.parametrize(
    ("naive", "channel"),
    [
        (naive_recurrent_gated_delta_rule, False),
        (naive_chunk_gated_delta_rule, False),
        (naive_recurrent_kda, True),
        (naive_chunk_kda, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_naive_names(naive: Any, channel: bool, dtype: torch.dtype):
    """FLA's argument orders (by position), dtypes and defaults; nothing is written to."""
    made = make_inputs(T=70, channel=channel, dtype=dtype)
    before = [x.clone() for x in made]
    gates = (made.beta, made.g) if naive is naive_recurrent_gated_delta_rule else (made.g, made.beta)
    o, state = naive(
        made.q, made.k, made.v, *gates, scale=0.3, initial_state=made.initial_state, output_final_state=True
    )
    want_o, want_state = reference(made, scale=0.3)
    assert o.dtype == (dtype if channel else torch.float32) and state.dtype == torch.float32
    assert nmse(o, want_o) < (1e-5 if o.dtype == torch.bfloat16 else 1e-12) and nmse(state, want_state) < 1e-12
    assert all(torch.equal(x, y) for x, y in zip(made, before, strict=True))

    o, state = naive(made.q, made.k, made.v, *gates)
    assert state is None
    without_state = made._replace(initial_state=torch.zeros_like(made.initial_state))
    assert nmse(o, reference(without_state)[0]) < 1e-5
