"""What must hold whatever the numbers: cuts, packs, batches and heads are independent, inputs are left alone, and
memory does not grow with T."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fla_npu.testing import CASES, nmse
from tests.ops.calls import CHUNKED, OPS, Arguments, assert_accurate, make_call, run

TOKENS = ("q", "k", "v", "g", "beta")

# Two float32 results of the same thing, each allowed the error of `calls.FLOAT32_NMSE` from the truth: errors add up,
# so that their squares quadruple.
BOUND = 4e-11


def cut(call: Arguments, start: int | None, end: int | None) -> Arguments:
    """The call over some of its tokens."""
    return {name: x[:, start:end] if name in TOKENS else x for name, x in call.items()}


def assert_same(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    for what, x, y in zip(("o", "state"), got, want, strict=True):
        assert_accurate(what, x, y, BOUND)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=15)
@given(
    cuts=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    case=st.sampled_from(CASES),
    v_first=st.booleans(),
    state=st.booleans(),
)
def test_prefill_in_pieces_is_one_pass(op: str, cuts: list[int], case: str, v_first: bool, state: bool):
    call = make_call(op, case, T=150, B=2, v_first=v_first, state=state)
    want = run(op, call)
    outputs = []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 150], strict=True):
        o, call["initial_state"] = run(op, cut(call, start, end))
        outputs.append(o)
    assert_same((torch.cat(outputs, 1), call["initial_state"]), want)


@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("case", ["ordinary", "strong decay", "sudden decay", "equal keys", "zero rows"])
def test_decoding_is_the_chunk(family: str, v_first: bool, case: str):
    """Prefill through the chunk op, tokens one by one through the recurrent op: both see one model."""
    gate = "softplus" if case == "ordinary" else "none"
    call = make_call(f"chunk_{family}", case, B=2, T=90, v_first=v_first, l2norm=True, gate=gate)
    want = run(f"chunk_{family}", call)
    o, call["initial_state"] = run(f"chunk_{family}", cut(call, 0, 70))
    outputs = [o]
    for t in range(70, 90):
        o, call["initial_state"] = run(f"fused_recurrent_{family}", cut(call, t, t + 1))
        outputs.append(o)
    assert_same((torch.cat(outputs, 1), call["initial_state"]), want)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 30, 64, 65, 100]), min_size=1, max_size=6),
    v_first=st.booleans(),
    state=st.booleans(),
)
def test_a_pack_is_its_sequences_alone(op: str, lengths: list[int], v_first: bool, state: bool):
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    call = make_call(op, bounds=bounds, v_first=v_first, state=state, l2norm=True)
    o, states = run(op, call)
    del call["cu_seqlens"]
    for n, length in enumerate(lengths):
        alone = cut(call, bounds[n], bounds[n] + length)
        if state:
            alone["initial_state"] = call["initial_state"][n : n + 1]
        assert_same((o[:, bounds[n] : bounds[n + 1]], states[n : n + 1]), run(op, alone))


@pytest.mark.parametrize("op", OPS)
def test_sequences_of_a_pack_do_not_see_each_other(op: str):
    """Whatever stands in the other sequences, even NaN; though their decays may choose another rounding for KDA."""
    call = make_call(op, bounds=[0, 50, 100, 100, 150])
    o, states = run(op, call)
    dirty = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    for name in TOKENS:
        dirty[name][:, 50:100] = float("nan")
    dirty["initial_state"][1] = float("nan")
    o2, states2 = run(op, dirty)
    rest = [*range(50), *range(100, 150)]
    assert_same((o2[:, rest], states2[[0, 2, 3]]), (o[:, rest], states[[0, 2, 3]]))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 100])
def test_later_tokens_do_not_change_earlier_outputs(op: str, T: int):
    call = make_call(op, T=T + 30)
    o, _ = run(op, call)
    dirty = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    for name, value in {"q": 0.3, "k": -0.2, "v": 7.0, "beta": 0.1, "g": -3.0}.items():
        dirty[name][:, T:] = value
    assert nmse(run(op, dirty)[0][:, :T], o[:, :T]) < BOUND


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 100])
def test_a_batch_is_its_rows_alone(op: str, T: int):
    call = make_call(op, B=3, T=T, gate="softplus", beta="sigmoid")
    o, states = run(op, call)
    per_row = (*TOKENS, "initial_state")
    for b in range(3):
        row = {name: x[b : b + 1] if name in per_row else x for name, x in call.items()}
        assert_same((o[b : b + 1], states[b : b + 1]), run(op, row))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 100])
def test_equal_sequences_as_batch_and_as_pack(op: str, T: int):
    call = make_call(op, B=3, T=T)
    o, states = run(op, call)
    packed = {name: x.flatten(0, 1)[None] if name in TOKENS else x for name, x in call.items()}
    packed["cu_seqlens"] = torch.arange(4) * T
    packed_o, packed_states = run(op, packed)
    assert torch.equal(packed_o[0], o.flatten(0, 1)) and torch.equal(packed_states, states)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 100])
def test_heads_are_independent(op: str, T: int):
    """Groups of value heads change places with their query heads, value heads within their group."""
    call = make_call(op, H=3, HV=6, T=T, gate="softplus", beta="sigmoid", l2norm=True)
    o, states = run(op, call)
    groups = torch.tensor([2, 0, 1])
    value_heads = torch.tensor([5, 4, 0, 1, 3, 2])  # the value heads of these groups, some swapped
    moved = dict(call)
    for name in ("q", "k"):
        moved[name] = call[name][:, :, groups]
    for name in ("v", "g", "beta"):
        moved[name] = call[name][:, :, value_heads]
    moved["initial_state"], moved["A_log"] = call["initial_state"][:, value_heads], call["A_log"][value_heads]
    moved["dt_bias"] = call["dt_bias"].view(6, -1)[value_heads].flatten()
    assert_same(run(op, moved), (o[:, :, value_heads], states[:, value_heads]))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 100])
def test_value_heads_read_the_query_head_of_their_group(op: str, T: int):
    """Consecutive groups: the same as `repeat_interleave`, not as `repeat`."""
    call = make_call(op, H=2, HV=6, T=T)
    repeated = {name: x.repeat_interleave(3, 2) if name in ("q", "k") else x for name, x in call.items()}
    assert_same(run(op, call), run(op, repeated))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 100])
def test_linear_in_values_and_state(op: str, T: int):
    call = make_call(op, T=T)
    o, state = run(op, call)
    doubled = {name: 4 * x if name in ("v", "initial_state") else x for name, x in call.items()}
    o4, state4 = run(op, doubled)
    assert torch.equal(o4, 4 * o) and torch.equal(state4, 4 * state)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("options", [{"T": 1, "B": 2}, {"T": 100, "B": 2}, {"bounds": [0, 1, 2, 2, 70, 138]}], ids=str)
def test_the_same_call_gives_the_same_bits(op: str, options: dict[str, Any]):
    call = make_call(op, **options)
    first, second = run(op, call), run(op, call)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(x.data_ptr() != y.data_ptr() for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "options",
    [
        {"T": 1},
        {"T": 1, "v_first": True},
        {"T": 0},
        {"T": 130, "B": 2, "l2norm": True, "gate": "softplus", "beta": "sigmoid"},
        {"bounds": [0, 1, 2, 2, 70, 138], "v_first": True},
        {"T": 130, "case": "time fastest"},
        {"T": 130, "case": "sudden decay"},
    ],
    ids=str,
)
def test_inputs_are_left_alone(op: str, options: dict[str, Any]):
    """Not one bit of any input changes, nor its version; results are fresh and contiguous memory."""
    call = make_call(op, **options)
    tensors = {name: x for name, x in call.items() if isinstance(x, torch.Tensor)}
    before = {name: (x.clone(), x._version) for name, x in tensors.items()}
    results = run(op, call)
    for name, x in tensors.items():
        assert torch.equal(x, before[name][0]) and x._version == before[name][1], name
    memory = {x.untyped_storage().data_ptr() for x in tensors.values() if x.numel()}
    assert all(x.untyped_storage().data_ptr() not in memory for x in results)
    assert all(x.is_contiguous() for x in results)


# --- memory -------------------------------------------------------------------------------------------------------


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that operators made since the start and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and not self._known(x):
                self._seen.add(x.untyped_storage()._cdata)  # of the caller: not counted
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not self._known(x):
                self._count(x.untyped_storage())
        return result

    def _known(self, x: torch.Tensor) -> bool:
        return x.untyped_storage()._cdata in self._seen

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def freed() -> None:
            self._seen.discard(key)
            self.now -= size

        weakref.finalize(storage, freed)


def peak_of(function: Callable[[], Any]) -> tuple[int, int]:
    """Peak bytes within a call, and those that its results keep."""
    with LiveMemory() as memory:
        results = function()
    del results
    kept = memory.now
    return memory.peak, kept


def bytes_of(*tensors: torch.Tensor | None) -> int:
    return sum(x.nbytes for x in tensors if x is not None)


def test_the_meter():
    with LiveMemory() as memory:
        x = torch.ones(1000)
        y = x.view(10, 100) + 1
        del x
        z = y * 2
        del y
    assert (memory.peak, memory.now) == (8000, 4000) and z.nbytes == 4000


def repeated(call: Arguments, times: int) -> Arguments:
    """The call over its tokens again and again: longer, with decays of the same strength in every chunk."""
    longer = {name: torch.cat([x] * times, 1) if name in TOKENS else x for name, x in call.items()}
    if "cu_seqlens" in call:
        longer["cu_seqlens"] = call["cu_seqlens"] * times
    return longer


def extra_bytes(op: str, call: Arguments) -> int:
    """Peak beyond the outputs."""
    results: list[torch.Tensor | None] = []
    peak, _ = peak_of(lambda: results.extend(run(op, call)))
    return peak - bytes_of(*results)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", ["ordinary", "strong decay"])
@pytest.mark.parametrize(("dtype", "packed"), [(torch.float32, False), (torch.bfloat16, True)])
def test_extra_memory_does_not_grow_with_length(op: str, case: str, dtype: torch.dtype, packed: bool):
    """Beyond its outputs a forward pass needs the same number of bytes at 8192 and at 16384 tokens, gates included."""
    gate = "softplus" if case == "ordinary" else "none"
    options: Arguments = {"bounds": [0, 256, 512]} if packed else {"T": 512}
    call = make_call(op, case, dtype=dtype, l2norm=True, beta="sigmoid", gate=gate, **options)
    # Both from the second block of gates on, see CHUNKS_PER_GATE_BLOCK.
    extra = [extra_bytes(op, repeated(call, times)) for times in (16, 32)]
    assert extra[0] == extra[1]
    # The state is 4 * 16 * 12 numbers. Working memory of a chunk: some matrices of 64 x 64 and 64 x 16 per head.
    assert extra[0] < 60 * 4 * 64 * 64 * 4


@pytest.mark.parametrize("op", OPS)
def test_extra_memory_does_not_grow_with_the_batch(op: str):
    """Sequences are taken some at a time."""
    few, many = (extra_bytes(op, make_call(op, B=B, T=128)) for B in (64, 256))
    assert few == many


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("case", ["ordinary", "strong decay"])
def test_backward_keeps_one_state_per_chunk(op: str, case: str):
    """Between the passes nothing but the inputs; in the backward pass the gradients and a state for every chunk."""
    extra = []
    for times in (4, 8):
        call = repeated(make_call(op, case, T=512), times)
        leaves = {name: call[name].clone().requires_grad_() for name in (*TOKENS, "initial_state")}
        results: list[Any] = []
        _, kept = peak_of(lambda call=call, leaves=leaves, results=results: results.extend(run(op, call | leaves)))
        outputs = bytes_of(*results)
        assert kept <= outputs + 4096, "the forward pass keeps something for the backward pass"
        starts = [torch.ones_like(x) for x in results]
        with LiveMemory() as memory:
            torch.autograd.backward(results, starts)
        states = times * 512 // 64 * bytes_of(call["initial_state"])
        extra.append(memory.peak - bytes_of(*(x.grad for x in leaves.values())) - states)
    assert extra[1] - extra[0] <= 4096, f"grows from {extra[0]} to {extra[1]}"
