"""Who computes what: every element once, by the program that the schedule names, and the same bits whoever it is.

What is equal bit by bit here is what is computed from tiles of the same shape. numpy, which the interpreter multiplies
with, may add in another order for another shape, so other widths of tiles are compared up to rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from fla_npu.ops.common import launch
from fla_npu.ops.common.configs import Config
from fla_npu.ops.common.launch import launch_chunks
from fla_npu.planner.schedule import Schedule
from tests.kernels.calls import EPS, Call, bounds_of, check, definition, limits, make_call, run

OPS = {"gdn": False, "kda": True}


class Writes:
    """How often each program of a launch wrote each element of some tensors."""

    def __init__(self) -> None:
        self.stores: list[tuple[int, np.ndarray]] = []

    def of(self, x: torch.Tensor, cores: int) -> torch.Tensor:
        """`[cores, *x.shape]` of a contiguous x."""
        counts = torch.zeros(cores, x.numel(), dtype=torch.int64)
        for program, addresses in self.stores:
            index = (addresses.astype(np.int64) - x.data_ptr()) // x.element_size()
            index = index[(index >= 0) & (index < x.numel())]
            if len(index):
                # One store has no element twice.
                counts[program, torch.from_numpy(index)] += 1
        return counts.view(cores, *x.shape)


@contextmanager
def watched_writes() -> Iterator[Writes]:
    writes = Writes()
    store = interpreter.InterpreterBuilder.create_masked_store

    def recorded(self, ptrs, value, mask, *options):
        writes.stores.append((self.grid_idx[0], ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]))
        return store(self, ptrs, value, mask, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_store", recorded)
        yield writes


def schedule_of(call: Call, config: Config, cores: int, lengths: list[int] | None) -> Schedule:
    bounds = None if call.bounds is None else torch.tensor(call.bounds)
    return launch.dealt(call.tensors, call.options, config, cu_seqlens=bounds, lengths=lengths, cores=cores).schedule


def check_writes(call: Call, config: Config, cores: int, lengths: list[int] | None) -> None:
    """Elements of o and of the final state are written once, each by the program that has it."""
    plan = schedule_of(call, config, cores, lengths)
    with watched_writes() as writes:
        o, final = launch_chunks(
            call.tensors,
            call.options,
            config,
            cu_seqlens=None if call.bounds is None else torch.tensor(call.bounds),
            lengths=lengths,
            cores=cores,
        )
    of_o, of_state = writes.of(o, cores), writes.of(final, cores)
    expected_o, expected_state = torch.zeros_like(of_o), torch.zeros_like(of_state)
    for core in range(cores):
        for item in plan.core(core):
            columns = slice(item.column, item.column + item.columns)
            if call.bounds is None:
                batch, tokens = item.sequence, slice(None)
            else:
                batch, tokens = 0, slice(*call.bounds[item.sequence : item.sequence + 2])
            expected_o[core, batch, tokens, item.head, columns] += 1
            if call.lengths[item.sequence]:
                expected_state[core, item.sequence, item.head, :, columns] += 1
    assert torch.equal(of_o, expected_o)
    assert torch.equal(of_state, expected_state)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=12)
@given(
    lengths=st.lists(st.sampled_from((0, 1, 17, 33)), min_size=1, max_size=3),
    known=st.booleans(),
    HV=st.sampled_from((1, 2, 3)),
    V=st.sampled_from((16, 48, 64, 96)),
    width=st.sampled_from((32, 64)),
    tile=st.sampled_from((0, 16, 32)),
    cores=st.sampled_from((1, 2, 3, 7, 24)),
)
def test_each_program_writes_its_share_of_a_pack_and_nothing_else(op, lengths, known, HV, V, width, tile, cores):
    config = Config(chunk=16, width=width, tile=tile if tile < width else 0)
    # Sizes that are not padded, so that results are what the kernel wrote.
    call = make_call(lengths=lengths, HV=HV, K=16, V=V, channel=OPS[op])
    check_writes(call, config, cores, call.lengths if known else None)


@pytest.mark.parametrize("cores", [1, 4, 10, 24])
@pytest.mark.parametrize("known", [False, True])
def test_each_program_writes_its_share_of_a_batch(cores, known):
    """12 heads; on 10 cores 10 whole ones and tiles of the others."""
    call = make_call(B=4, T=20, H=1, HV=3, K=16, V=64)
    config = Config(chunk=16, width=64, tile=32)
    check_writes(call, config, cores, call.lengths if known else None)
    if cores == 10:
        assert schedule_of(call, config, cores, None).split.parts == 2


@pytest.mark.parametrize("op", OPS)
def test_a_table_has_whole_units_and_tiles(op):
    """A long sequence between short ones, which has its head in tiles."""
    call = make_call(lengths=[16, 300, 16], HV=1, K=16, V=128, channel=OPS[op])
    config = Config(chunk=16, width=128, tile=32)
    plan = schedule_of(call, config, 4, call.lengths)
    assert plan.order is not None and plan.split.parts == 4
    assert {item.columns for core in range(4) for item in plan.core(core)} == {32, 128}
    check_writes(call, config, 4, call.lengths)
    check(call, config, cores=4, lengths=call.lengths)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [32, 64])
def test_every_number_of_programs_and_every_order_gives_the_same_bits(op, width):
    call = make_call(lengths=[20, 0, 3, 40, 1], H=1, HV=2, K=32, V=64, channel=OPS[op], dtype=torch.float16)
    config = Config(chunk=16, width=width)
    for fast in (False, True):
        o, final = run(call, config, cores=1, fast=fast)
        for cores in (2, 3, 24):
            for known in (None, call.lengths):
                other, other_final = run(call, config, cores=cores, lengths=known, fast=fast)
                assert torch.equal(other, o) and torch.equal(other_final, final)


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    chunk=st.sampled_from((16, 64)),
    gate=st.sampled_from(("mild", "sudden", "softplus")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    l2norm=st.booleans(),
    fast=st.booleans(),
)
def test_a_pack_is_its_sequences_run_alone(op, lengths, chunk, gate, dtype, l2norm, fast):
    call = make_call(
        lengths=lengths, H=1, HV=2, K=20, V=32, channel=OPS[op], gate=gate, dtype=dtype, l2norm=l2norm, v_first=True
    )
    config = Config(chunk=chunk)
    o, final = run(call, config, fast=fast)
    for n, (start, end) in enumerate(zip(call.bounds, call.bounds[1:], strict=False)):
        alone, last = run(call.alone(n), config, cores=1, fast=fast)
        assert torch.equal(alone, o[:, start:end]) and torch.equal(last[0], final[n])


@pytest.mark.parametrize("op", OPS)
def test_a_batch_is_its_rows_run_alone(op):
    call = make_call(B=3, T=37, H=2, HV=4, K=20, V=32, channel=OPS[op])
    o, final = run(call, Config(chunk=16))
    for b in range(3):
        state = call.tensors.initial_state[b : b + 1]
        row = call.tensors.map_tokens(lambda x, b=b: x[b : b + 1])._replace(initial_state=state)
        alone, last = run(call._replace(tensors=row), Config(chunk=16))
        assert torch.equal(alone[0], o[b]) and torch.equal(last[0], final[b])


@pytest.mark.parametrize("op", OPS)
def test_a_batch_is_a_pack_of_its_rows(op):
    call = make_call(B=3, T=37, HV=2, K=20, V=32, channel=OPS[op], gate="sudden")
    pack = call.tensors.map_tokens(lambda x: x.flatten(0, 1)[None])
    o, final = run(call, Config(chunk=16))
    packed, last = run(Call(pack, call.options, bounds_of([37] * 3)), Config(chunk=16))
    assert torch.equal(packed[0], o.flatten(0, 1)) and torch.equal(last, final)


@pytest.mark.parametrize("op", OPS)
def test_heads_of_a_group_are_heads_with_keys_of_their_own(op):
    call = make_call(T=37, H=2, HV=6, K=20, V=32, channel=OPS[op])
    o, final = run(call, Config(chunk=16))
    q, k, *rest = call.tensors
    tensors = type(call.tensors)(q.repeat_interleave(3, 2), k.repeat_interleave(3, 2), *rest)
    alone, last = run(call._replace(tensors=tensors), Config(chunk=16))
    assert torch.equal(alone, o) and torch.equal(last, final)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_column_tiles_are_the_whole_width(op, tile):
    """Up to rounding: both have the same bounds. In the interpreter they differ where numpy adds in another order."""
    call = make_call(T=40, H=1, HV=1, K=64, V=128, channel=OPS[op])
    o, final = run(call, Config(chunk=16), cores=1)
    tiled = Config(chunk=16, tile=tile)
    assert schedule_of(call, tiled, 24, None).split.parts == 128 // tile
    other, other_final = run(call, tiled, cores=24)
    rows, states = limits(call, definition(call), tiled, False)
    assert ((other - o).norm(dim=3) <= 2 * rows).all()
    assert ((other_final - final).flatten(2).norm(dim=2) <= 2 * states).all()
    # That is far less than what any of the operations would change: a number in a million.
    assert (2 * states <= 2**14 * EPS * definition(call).largest).all()


def test_lengths_of_one_number_of_chunks_need_no_table():
    call = make_call(lengths=[17, 30, 25], HV=2, K=16, V=32)
    assert schedule_of(call, Config(chunk=16), 3, call.lengths).order is None
    o, final = run(call, Config(chunk=16), lengths=call.lengths)
    other, other_final = run(call, Config(chunk=16))
    assert torch.equal(o, other) and torch.equal(final, other_final)
