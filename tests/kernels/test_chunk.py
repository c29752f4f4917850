"""The chunk kernel against the recurrence in float64."""

import mmap
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.compiler.build import KernelBuild
from fla_npu.ops.common import builds, launch
from fla_npu.ops.common.configs import Config, piece_size, tile_size
from fla_npu.ops.common.launch import launch_chunks
from fla_npu.ops.problem import Tensors
from tests.kernels.calls import BETAS, GATES, Call, check, definition, limits, make_call, run

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ALL = tuple(DTYPES.values())
OPS = {"gdn": False, "kda": True}
SIZES = (16, 32, 60, 64, 96, 100, 128, 192, 256)


@st.composite
def calls(draw, channel: bool, packed: bool, dtypes=ALL, longest=300) -> Call:
    """Calls of few chunks: at most 300 tokens of all heads."""
    H, group = draw(st.sampled_from(((1, 1), (1, 2), (1, 3), (2, 1), (2, 2))))
    budget = longest // (H * group)
    lengths, B = None, 1
    if packed:
        lengths = draw(st.lists(st.sampled_from((0, 1)) | st.integers(0, budget // 3), min_size=1, max_size=5))
    else:
        B = draw(st.integers(1, 2))
    sizes = st.sampled_from(SIZES[:7] if H * group > 1 else SIZES)
    return make_call(
        B=B,
        T=draw(st.integers(0, budget // B)),
        lengths=lengths,
        H=H,
        HV=H * group,
        K=draw(sizes),
        V=draw(sizes),
        channel=channel,
        dtype=draw(st.sampled_from(dtypes)),
        gate=draw(st.sampled_from(GATES)),
        lower_bound=draw(st.sampled_from((-5.0, -1.0, -30.0))),
        bias=draw(st.booleans()),
        beta=draw(st.sampled_from(BETAS)),
        l2norm=draw(st.booleans()),
        initial=draw(st.booleans()),
        final=draw(st.booleans()),
        v_first=draw(st.booleans()),
        fused=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 1.0))),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def configs(draw) -> Config:
    width = draw(st.sampled_from((32, 64, 128)))
    tiles = [0] + [tile for tile in (16, 32, 64) if tile < width]
    return Config(chunk=draw(st.sampled_from((64, 32, 16))), width=width, tile=draw(st.sampled_from(tiles)))


cores = st.sampled_from((1, 2, 3, 7, 24))


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "pack"])
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=20)
@given(data=st.data(), config=configs(), cores=cores, known=st.booleans())
def test_calls(op, packed, data, config, cores, known):
    call = data.draw(calls(OPS[op], packed))
    check(call, config, cores=cores, lengths=call.lengths if known else None)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=10)
@given(data=st.data(), packed=st.booleans(), config=configs(), cores=cores)
def test_fast_calls(op, dtype, data, packed, config, cores):
    call = data.draw(calls(OPS[op], packed, dtypes=(DTYPES[dtype],), longest=130))
    check(call, config, fast=True, cores=cores)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("K", SIZES)
def test_every_pair_of_head_sizes(op, K):
    for V in SIZES:
        # One whole chunk and a tail.
        check(make_call(T=21, HV=1, K=K, V=V, channel=OPS[op], seed=V), Config(chunk=16))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_with_every_beta(op, gate, beta):
    """Three chunks of 64, more than one for each decision about strong decays."""
    check(make_call(T=140, HV=1, K=16, V=16, channel=OPS[op], gate=gate, beta=beta))


def shipped() -> list[KernelBuild]:
    return [build for build in builds.shipped() if build.kernel.endswith(":delta_rule_kernel")]


@pytest.mark.parametrize("build", shipped(), ids=lambda build: build.name)
def test_every_configuration_that_ships(build, monkeypatch):
    """With the compile-time constants of the build but for the heads, of which there are less, for time."""
    C = dict(build.constants)
    heads = 3 * C["GROUP"] if C["PARTS"] == 1 else C["GROUP"]
    channel = C["DECAY"] == "channel"
    call = make_call(
        B=1,
        T=C["C"] + 9,
        lengths=[3, 0, C["C"] + 6] if C["VARLEN"] else None,
        H=heads // C["GROUP"],
        HV=heads,
        K=C["K"],
        V=C["V"],
        channel=channel,
        dtype=DTYPES[build.signature["q"].removeprefix("*")],
        gate="bounded" if channel and not C["MAY_BE_STRONG"] else "forgetful",
        l2norm=C["L2NORM"],
        initial=C["HAS_H0"],
        final=C["HAS_HT"],
        v_first=C["V_FIRST"],
    )
    used = []
    constants = launch.constants
    monkeypatch.setattr(launch, "constants", lambda *a, **k: used.append(constants(*a, **k)) or used[-1])
    config = Config(chunk=C["C"], width=C["BV"], tile=C["TILE"] if C["PARTS"] > 1 else 0)
    # With more cores than units they are divided as much as they can be.
    check(call, config, fast=C["FAST"], cores=2 if C["PARTS"] == 1 else 24)
    absent = {name for name, value in build.constants.items() if value is None}
    assert [{**used[0], "HV": C["HV"]}] == [{name: C[name] for name in C if name not in absent}]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("v_first", [False, True])
def test_calls_without_tokens_hand_states_through(op, v_first):
    for lengths in (None, [0], [0, 0, 0]):
        call = make_call(B=2, T=0, lengths=lengths, K=20, V=36, channel=OPS[op], v_first=v_first)
        o, final = run(call)
        assert o.numel() == 0
        assert torch.equal(final, call.tensors.initial_state)
        assert final.data_ptr() != call.tensors.initial_state.data_ptr()
        call = call._replace(tensors=call.tensors._replace(initial_state=None))
        assert torch.equal(run(call)[1], torch.zeros_like(final))
    o, final = run(make_call(B=0, T=5, channel=OPS[op]))
    assert o.shape == (0, 5, 2, 32) and final.shape == (0, 2, 32, 32)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("v_first", [False, True])
def test_empty_sequences_hand_states_through(op, v_first):
    call = make_call(lengths=[0, 17, 0, 0, 1, 0], K=20, V=36, channel=OPS[op], v_first=v_first)
    for known in (None, call.lengths):
        _, final = run(call, Config(chunk=16), lengths=known)
        assert torch.equal(final[[0, 2, 3, 5]], call.tensors.initial_state[[0, 2, 3, 5]])
        _, final = run(call._replace(tensors=call.tensors._replace(initial_state=None)), Config(chunk=16))
        assert (final[[0, 2, 3, 5]] == 0).all()


@pytest.mark.parametrize("op", OPS)
def test_states_of_other_dtypes_and_strides(op):
    call = make_call(T=20, K=16, V=20, channel=OPS[op])
    state = call.tensors.initial_state
    for x in (state.bfloat16(), state.double(), state.mT.contiguous().mT):
        check(call._replace(tensors=call.tensors._replace(initial_state=x)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_are_read_where_they_are_or_copied(op, dtype, monkeypatch):
    """What the kernel gets of slices of a projection are the slices, of anything else copies; never a wrong read."""
    fused = make_call(T=40, H=2, HV=4, K=32, V=64, channel=OPS[op], dtype=DTYPES[dtype], fused=True)
    given = []
    rows = launch._rows
    monkeypatch.setattr(launch, "_rows", lambda x, width: given.append((x, rows(x, width))) or given[-1][1])
    check(fused)
    assert len(given) == 3 and all(before.data_ptr() == after.data_ptr() for before, after in given)
    given.clear()
    q, k, v = fused.tensors[:3]
    # Channels that are not side by side; heads that start within a line; tokens that go backwards are no torch stride.
    odd = torch.empty(1, 40, 2, 33, dtype=q.dtype)[..., 1:].copy_(k)
    others = Tensors(q.movedim(1, -1).contiguous().movedim(-1, 1), odd, v.mT.contiguous().mT, *fused.tensors[3:])
    check(fused._replace(tensors=others))
    assert all(before.data_ptr() != after.data_ptr() for before, after in given)
    # A row that every token shares.
    shared = fused.tensors._replace(k=k[:, :1].expand_as(k))
    copied = shared._replace(k=shared.k.clone())
    a, b = (launch_chunks(x, fused.options, Config(), cores=1) for x in (shared, copied))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """x with tokens 2^24 elements apart, the largest step that is not copied, in memory that is there where touched.

    As much lies before it as offsets go below zero that wrap around at 2^31.
    """
    step, room = 2**24 - 16, 2**31
    no_reserve = 0x4000
    size = (room + x.shape[1] * step) * x.element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    strides = (x.shape[1] * step, step, x.shape[3], 1)
    return torch.frombuffer(memory, dtype=x.dtype)[room:].as_strided(x.shape, strides).copy_(x)


@pytest.mark.skipif(sys.platform != "linux", reason="memory that is not reserved")
@pytest.mark.parametrize("op", OPS)
def test_offsets_beyond_32_bits(op):
    """What a million tokens of many heads need: 200 tokens far apart."""
    call = make_call(T=200, HV=1, K=16, V=16, dtype=torch.float16, channel=OPS[op], l2norm=True)
    q, k, v, *rest = call.tensors
    far = Tensors(far_apart(q), far_apart(k), far_apart(v), *rest)
    a, b = (launch_chunks(x, call.options, Config(), cores=1) for x in (far, call.tensors))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_one_sequence_or_head_holds_does_not_reach_others(op, poison):
    call = make_call(lengths=[21, 18, 3, 30], H=2, HV=4, K=20, V=20, channel=OPS[op])
    clean, clean_state = run(call, Config(chunk=16))
    q, k, v, *rest = (x.clone() if isinstance(x, torch.Tensor) else x for x in call.tensors)
    for x in (q, k, v):
        x[:, 21:39] = poison
    o, state = run(call._replace(tensors=Tensors(q, k, v, *rest)), Config(chunk=16))
    assert not o[:, 21:39].isfinite().any()
    o[:, 21:39], state[1] = clean[:, 21:39], clean_state[1]
    assert torch.equal(o, clean) and torch.equal(state, clean_state)
    v = call.tensors.v.clone()
    v[:, :, 2] = poison
    o, state = run(call._replace(tensors=call.tensors._replace(v=v)), Config(chunk=16))
    others = [0, 1, 3]
    assert not o[:, :, 2].isfinite().any()
    assert torch.equal(o[:, :, others], clean[:, :, others])
    assert torch.equal(state[:, others], clean_state[:, others])


@pytest.mark.parametrize("op", OPS)
def test_later_tokens_do_not_change_earlier_ones(op):
    """GDN: not in one bit. KDA: up to rounding, as the reference row of a block comes from later tokens too."""
    call = make_call(T=75, HV=1, K=20, V=20, channel=OPS[op], gate="forgetful")
    config = Config(chunk=32)
    o, _ = run(call, config)
    rows, _ = limits(call, definition(call), config, False)
    for first in (16, 37, 64):
        tensors = call.tensors.map_tokens(
            lambda x, first=first: torch.cat([x[:, :first], x[:, first:].flip(1) * 0.5], 1)
        )
        changed, _ = run(call._replace(tensors=tensors), config)
        difference = (changed - o)[:, :first].norm(dim=3)
        assert (difference <= (2 * rows[:, :first] if OPS[op] else 0)).all()
        assert not torch.equal(changed[:, first:], o[:, first:])


@pytest.mark.parametrize("op", OPS)
def test_the_state_carries_on_where_a_sequence_is_cut(op):
    """A prefill in two calls, the border within a chunk, is that of one call; a chunk more may cost as much more."""
    call = make_call(T=90, K=20, V=36, channel=OPS[op], gate="forgetful")
    wanted = definition(call)
    rows, states = limits(call, wanted, Config(), False)
    parts, state = [], call.tensors.initial_state
    for tokens in (slice(0, 37), slice(37, 90)):
        part = call.tensors.map_tokens(lambda x, tokens=tokens: x[:, tokens])._replace(initial_state=state)
        o, state = run(call._replace(tensors=part))
        parts.append(o)
    assert ((torch.cat(parts, 1) - wanted.o).norm(dim=3) <= 2 * rows).all()
    assert ((state - wanted.final).flatten(2).norm(dim=2) <= 2 * states).all()


@given(
    bound=st.floats(-200, -1e-3),
    chunk=st.sampled_from((16, 32, 64)),
)
def test_pieces_neither_overflow_nor_are_smaller_than_they_need(bound, chunk):
    size = piece_size(bound, chunk)
    assert 1 <= size <= chunk and chunk % size == 0
    assert size == 1 or size / 2 * -bound <= 44
    assert size == chunk or size * -bound > 44


@given(V=st.integers(1, 256), width=st.sampled_from((32, 64, 128)), tile=st.sampled_from((0, 16, 32, 64)))
def test_configurations_fit_the_head(V, width, tile):
    fitted = Config(width=width, tile=tile if tile < width else 0).fit(V)
    assert fitted.width == min(width, tile_size(V))
    assert fitted.tile == 0 or fitted.tile < fitted.width
    assert fitted.fit(V) == fitted
