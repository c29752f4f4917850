"""`fused_recurrent_kda_fwd`: states updated where they lie, in the caller's tensor or in slots of a pool."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from tests.ops.calls import Arguments, assert_accurate, expected, make_call

OP = "fused_recurrent_kda"
TOKENS = ("q", "k", "v", "g", "beta")


def call_of(lengths: list[int] | None = None, **options: Any) -> Arguments:
    """A call over sequences of these lengths, packed; without `output_final_state`, which is not needed in place."""
    if lengths is not None:
        options["bounds"] = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    call = make_call(OP, **options)
    del call["output_final_state"]
    return call


def pool_of(call: Arguments, slots: int) -> torch.Tensor:
    """Random states; what no sequence uses is filled with 1e30, which shows up wherever it leaks."""
    shape = (slots, *call["initial_state"].shape[1:])
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def by_tokens(call: Arguments, lengths: list[int], starts: list[torch.Tensor]) -> tuple[torch.Tensor, list[list[Any]]]:
    """o, and for each sequence its states after each of its tokens, in float64."""
    outputs, states = [], []
    packed = "cu_seqlens" in call
    bounds = call["cu_seqlens"].tolist() if packed else None
    for n, start in enumerate(starts):
        state, after, rows = start, [], []
        for t in range(lengths[n]):
            token = (
                {name: call[name][:, bounds[n] + t : bounds[n] + t + 1] for name in TOKENS}
                if packed
                else {name: call[name][n : n + 1, t : t + 1] for name in TOKENS}
            )
            rest = {name: x for name, x in call.items() if name not in (*TOKENS, "cu_seqlens", "initial_state")}
            o, state = expected(OP, {**rest, **token, "initial_state": state})
            rows.append(o)
            after.append(state)
        outputs += [torch.cat(rows, 1)] if rows else []
        states.append(after)
    return torch.cat(outputs, 1 if packed else 0) if outputs else call["v"].double(), states


@pytest.mark.parametrize("options", [{"B": 3, "T": 1}, {"B": 2, "T": 7}, {"lengths": [3, 0, 1, 5]}], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place(options: dict[str, Any], v_first: bool, dtype: torch.dtype):
    """The default: the final states are written into `initial_state`, which is also what is returned."""
    call = call_of(v_first=v_first, dtype=dtype, l2norm=True, beta="sigmoid", **options)
    want_o, want_state = expected(OP, call)
    state = call["initial_state"].clone()
    o, returned = fused_recurrent_kda_fwd(**{**call, "initial_state": state})
    assert returned is state and o.dtype == dtype
    assert_accurate("o", o, want_o)
    assert_accurate("state", state, want_state)


@pytest.mark.parametrize("final", [False, True])
def test_not_in_place(final: bool):
    call = call_of(B=2, T=5)
    before = call["initial_state"].clone()
    o, state = fused_recurrent_kda_fwd(**call, inplace_final_state=False, output_final_state=final)
    want_o, want_state = expected(OP, call)
    assert torch.equal(call["initial_state"], before)
    assert_accurate("o", o, want_o)
    assert (state is None) != final
    if final:
        assert_accurate("state", state, want_state)
    del call["initial_state"]
    o, _ = fused_recurrent_kda_fwd(**call, inplace_final_state=False)
    assert_accurate("o", o, expected(OP, call)[0])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("two_dimensional", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{"B": 4, "T": 1}, {"lengths": [1, 1, 0, 1]}], ids=str)
def test_decoding_with_a_pool(v_first: bool, two_dimensional: bool, index_dtype: torch.dtype, options: dict[str, Any]):
    call = call_of(v_first=v_first, gate="bounded", l2norm=True, **options)
    pool = pool_of(call, 12)
    slots = [7, 2, 9, 0]
    unused = [i for i in range(12) if i not in slots]
    pool[unused] = 1e30
    before = pool.clone()
    indices = torch.tensor(slots, dtype=index_dtype)
    indices = indices[:, None] if two_dimensional else indices
    o, returned = fused_recurrent_kda_fwd(**{**call, "initial_state": pool, "ssm_state_indices": indices})
    lengths = options.get("lengths", [1] * 4)
    want_o, after = by_tokens(call, lengths, [before[[slot]] for slot in slots])
    assert returned is pool
    assert_accurate("o", o, want_o)
    for slot, states in zip(slots, after, strict=True):
        if states:
            assert_accurate("state", pool[[slot]], states[-1])
        else:
            assert torch.equal(pool[slot], before[slot])
    assert torch.equal(pool[unused], before[unused])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@given(data=st.data())
def test_speculative_decoding(v_first: bool, packed: bool, data: st.DataObject):
    """Several tokens per sequence, each state to a slot of its own, from the last accepted one on."""
    columns = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, 4))
    if packed:
        lengths = data.draw(st.lists(st.integers(0, columns), min_size=count, max_size=count))
        call = call_of(lengths=lengths, v_first=v_first)
    else:
        lengths = [data.draw(st.integers(1, columns))] * count
        call = call_of(B=count, T=lengths[0], v_first=v_first)
    order = torch.randperm(3 * count * columns, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    indices = order[: count * columns].view(count, columns)
    accepted = data.draw(
        st.none() | st.lists(st.integers(1, columns), min_size=count, max_size=count).map(torch.tensor)
    )
    pool = pool_of(call, len(order))
    pool[order[count * columns :]] = 1e30
    before = pool.clone()
    o, _ = fused_recurrent_kda_fwd(
        **{**call, "initial_state": pool, "ssm_state_indices": indices, "num_accepted_tokens": accepted}
    )
    first = [0] * count if accepted is None else (accepted - 1).tolist()
    table = indices.tolist()
    want_o, after = by_tokens(call, lengths, [before[[table[n][first[n]]]] for n in range(count)])
    assert_accurate("o", o, want_o)
    untouched = set(range(len(order)))
    for n, states in enumerate(after):
        for t, state in enumerate(states):
            assert_accurate("state", pool[[table[n][t]]], state)
            untouched.remove(table[n][t])
    rest = sorted(untouched)
    assert torch.equal(pool[rest], before[rest])


@pytest.mark.parametrize("pooled", [False, True])
def test_out_receives_o(pooled: bool):
    call = call_of(B=3, T=1, dtype=torch.bfloat16)
    options = {"ssm_state_indices": torch.tensor([4, 0, 2])} if pooled else {}
    state = pool_of(call, 5) if pooled else call["initial_state"]
    want, _ = fused_recurrent_kda_fwd(**{**call, "initial_state": state.clone()}, **options)
    out = torch.full_like(call["v"], 5.0)
    o, _ = fused_recurrent_kda_fwd(**{**call, "initial_state": state.clone()}, **options, out=out)
    assert o is out and torch.equal(out, want)
    # o over v itself, and into a view of something larger
    v, wide = call["v"].clone(), torch.zeros(3, 1, 4, 24, dtype=torch.bfloat16)
    fused_recurrent_kda_fwd(**{**call, "v": v, "initial_state": state.clone()}, **options, out=v)
    fused_recurrent_kda_fwd(**{**call, "initial_state": state.clone()}, **options, out=wide[..., ::2])
    assert torch.equal(v, want) and torch.equal(wide[..., ::2], want) and not wide[..., 1::2].any()


@pytest.mark.parametrize("options", [{"B": 3, "T": 1}, {"lengths": [2, 0, 3]}], ids=str)
def test_beta_per_value_channel_with_a_pool(options: dict[str, Any]):
    call = call_of(**options)
    call["beta"] = torch.rand(call["v"].shape, generator=torch.Generator().manual_seed(0))
    pool, indices = pool_of(call, 9), torch.arange(9).view(3, 3)
    before = pool.clone()
    o, _ = fused_recurrent_kda_fwd(**{**call, "initial_state": pool, "ssm_state_indices": indices})
    want_o, after = by_tokens(call, options.get("lengths", [1] * 3), [before[[3 * n]] for n in range(3)])
    assert_accurate("o", o, want_o)
    for n, states in enumerate(after):
        for t, state in enumerate(states):
            assert_accurate("state", pool[[3 * n + t]], state)


def test_pool_of_16_bits():
    """States are rounded where they are stored, not on their way from token to token."""
    call = call_of(B=2, T=3)
    pool, indices = pool_of(call, 6).bfloat16(), torch.arange(6).view(2, 3)
    before = pool.clone()
    o, _ = fused_recurrent_kda_fwd(**{**call, "initial_state": pool, "ssm_state_indices": indices})
    want_o, after = by_tokens(call, [3, 3], [before[[0]], before[[3]]])
    assert_accurate("o", o, want_o)
    for n in range(2):
        for t in range(3):
            assert_accurate("state", pool[[3 * n + t]], after[n][t])


def test_float64_with_a_pool():
    call = call_of(B=2, T=3, dtype=torch.float64)
    pool, indices = pool_of(call, 6).double(), torch.arange(6).view(2, 3)
    before = pool.clone()
    o, _ = fused_recurrent_kda_fwd(**{**call, "initial_state": pool, "ssm_state_indices": indices})
    want_o, after = by_tokens(call, [3, 3], [before[[0]], before[[3]]])
    # States are carried in float32 from token to token.
    assert o.dtype == torch.float64
    assert_accurate("o", o, want_o)
    assert_accurate("states", pool, torch.cat([state for states in after for state in states]))


def test_new_states_instead_of_the_pool():
    call = call_of(B=3, T=1)
    pool = pool_of(call, 5)
    before = pool.clone()
    arguments = {**call, "initial_state": pool, "ssm_state_indices": torch.tensor([4, 1, 2])}
    o, state = fused_recurrent_kda_fwd(**arguments, inplace_final_state=False, output_final_state=True)
    want_o, after = by_tokens(call, [1] * 3, [before[[slot]] for slot in (4, 1, 2)])
    assert torch.equal(pool, before)
    assert_accurate("o", o, want_o)
    assert_accurate("state", state, torch.cat([states[0] for states in after]))
    assert fused_recurrent_kda_fwd(**arguments, inplace_final_state=False)[1] is None


def test_sequences_may_share_the_slot_they_start_from():
    """Beams that split: both read the old state before either writes."""
    call = call_of(B=2, T=1)
    pool = pool_of(call, 4)
    before = pool.clone()
    indices, accepted = torch.tensor([[1, 3], [2, 3]]), torch.tensor([2, 2])
    o, _ = fused_recurrent_kda_fwd(
        **{**call, "initial_state": pool, "ssm_state_indices": indices, "num_accepted_tokens": accepted}
    )
    want_o, after = by_tokens(call, [1, 1], [before[[3]]] * 2)
    assert_accurate("o", o, want_o)
    assert_accurate("state", pool[[1, 2]], torch.cat([states[0] for states in after]))
    assert torch.equal(pool[[0, 3]], before[[0, 3]])


@pytest.mark.parametrize("pooled", [False, True])
def test_no_gradients_and_no_autocast(pooled: bool):
    call = call_of(B=2, T=1, gate="softplus")
    options = {"ssm_state_indices": torch.tensor([1, 0])} if pooled else {}
    states = [call["initial_state"].clone() for _ in range(3)]
    want, _ = fused_recurrent_kda_fwd(**{**call, "initial_state": states[0]}, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = fused_recurrent_kda_fwd(**{**call, "initial_state": states[1]}, **options)
    assert torch.equal(o, want) and torch.equal(states[0], states[1])
    leaves = {name: call[name].clone().requires_grad_() for name in (*TOKENS, "A_log", "dt_bias")}
    o, state = fused_recurrent_kda_fwd(**{**call, **leaves, "initial_state": states[2]}, **options)
    assert torch.equal(o, want) and not o.requires_grad and not state.requires_grad


def test_a_pack_of_nothing():
    call = call_of(lengths=[0, 0])
    pool = pool_of(call, 3)
    before = pool.clone()
    o, _ = fused_recurrent_kda_fwd(**{**call, "initial_state": pool, "ssm_state_indices": torch.tensor([2, 0])})
    assert o.shape == (1, 0, 4, 12) and torch.equal(pool, before)


def test_token_by_token_is_the_whole():
    """A server's loop: prefill, then tokens one by one over the same slot."""
    lengths = [40, 25]
    call = call_of(lengths=lengths, l2norm=True)
    bounds = call["cu_seqlens"].tolist()
    want_o, want_state = expected(OP, call)
    pool = pool_of(call, 4)
    pool[[3, 1]] = call["initial_state"]
    outputs: list[list[torch.Tensor]] = [[], []]
    for t in range(max(lengths)):
        going = [n for n in range(2) if t < lengths[n]]
        rows = [bounds[n] + t for n in going]
        step = {
            **{name: call[name][0, rows][:, None] for name in TOKENS},
            "use_qk_l2norm_in_kernel": True,
            "initial_state": pool,
            "ssm_state_indices": torch.tensor([[3, 1][n] for n in going]),
        }
        o, _ = fused_recurrent_kda_fwd(**step)
        for n, x in zip(going, o, strict=True):
            outputs[n].append(x)
    for n, (start, end) in enumerate(pairwise(bounds)):
        assert_accurate("o", torch.cat(outputs[n])[None], want_o[:, start:end])
    assert_accurate("state", pool[[3, 1]], want_state)
