"""The recurrent kernel against the recurrence in float64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.compiler.build import KernelBuild
from fla_npu.ops.common import decode_kernel
from fla_npu.ops.common.decode_kernel import launch_recurrent, value_tile
from fla_npu.ops.common.reference import reference_forward
from fla_npu.ops.problem import Options, Problem, Tensors
from fla_npu.testing import CASES, make_inputs, rms_ratio
from tests.kernels.memory import guarded_results, surrounded
from tests.kernels.rounding import ROUNDING


def tolerance(T, K, dtype):
    """Bound of the relative root mean square error.

    A token rounds every element of the state about 6 times (decay, product, update), and sums K products of it, whose
    errors add up like a walk; the delta rule does not enlarge older errors (|I - beta k k^T| <= 1 for unit keys).
    """
    return (T + 1) * (8 + K**0.5) * 2.0**-24 + ROUNDING[dtype]


def double(tensors):
    return Tensors(*(None if x is None else x.double() for x in tensors))


def run(tensors, options, bounds=None, **arguments):
    """The kernel on copies in guarded memory; also those copies."""
    copies = Tensors(*map(surrounded, tensors))
    arguments = {name: surrounded(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    cu_seqlens = None if bounds is None else surrounded(torch.tensor(bounds, dtype=torch.int32))
    with guarded_results():
        o, final = launch_recurrent(copies, options, cu_seqlens, **{"cores": 3, **arguments})
    return o, final, copies


def check(tensors, options, bounds=None, **arguments):
    """Run the kernel and compare with the definition."""
    o, final, _ = run(tensors, options, bounds, **arguments)
    cut = None if bounds is None else tuple(bounds)
    want, want_final, _ = reference_forward(Problem(double(tensors), options, cut))
    T, K = tensors.q.shape[1], tensors.q.shape[3]
    limit = tolerance(T, K, tensors.v.dtype)
    assert o.dtype == tensors.v.dtype
    # Below the smallest normal number of a dtype its numbers have a fixed spacing.
    spacing = torch.finfo(o.dtype).eps * torch.finfo(o.dtype).smallest_normal
    error, size = torch.linalg.vector_norm(o.double() - want), torch.linalg.vector_norm(want)
    assert error <= limit * size + spacing / 2 * o.numel() ** 0.5
    assert (final is None) == (want_final is None)
    if final is not None:
        assert final.dtype == torch.float32
        assert rms_ratio(final, want_final) <= tolerance(T, K, torch.float32)


@given(
    data=st.data(),
    case=st.sampled_from(CASES),
    channel=st.booleans(),
    heads=st.sampled_from(((1, 1), (1, 3), (2, 4))),
    K=st.sampled_from((8, 16, 20, 60)),
    V=st.sampled_from((7, 16, 40)),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    v_first=st.booleans(),
    initial=st.booleans(),
    final=st.booleans(),
    l2norm=st.booleans(),
    packed=st.booleans(),
)
def test_calls_with_finished_gates(data, case, channel, heads, K, V, dtype, v_first, initial, final, l2norm, packed):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)) if packed else None
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)] if packed else None
    B, T = (1, bounds[-1]) if packed else (data.draw(st.integers(1, 2)), data.draw(st.integers(0, 5)))
    N = len(lengths) if packed else B
    x = make_inputs(case, B=B, T=T, H=heads[0], HV=heads[1], K=K, V=V, channel=channel, sequences=N, dtype=dtype)
    if case == "huge values" and dtype == torch.float16:
        x = x._replace(v=x.v / 16)
    state = x.initial_state.mT.contiguous() if v_first else x.initial_state
    options = Options(
        decay="channel" if channel else "scalar",
        scale=data.draw(st.sampled_from((K**-0.5, 1.0))),
        qk_l2norm=l2norm,
        state_v_first=v_first,
        output_final_state=final,
    )
    check(Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, state if initial else None), options, bounds)


@given(
    channel=st.booleans(),
    gate=st.sampled_from(("softplus", "bounded")),
    bias=st.booleans(),
    per_value=st.booleans(),
    strong=st.sampled_from((1.0, 20.0)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    beta_scale=st.sampled_from((1.0, 2.0)),
    v_first=st.booleans(),
    seed=st.integers(0, 9),
)
def test_gates_and_betas_from_logits(channel, gate, bias, per_value, strong, dtype, beta_scale, v_first, seed):
    HV, K, V = 2, 24, 20
    x = make_inputs(B=2, T=3, H=1, HV=HV, K=K, V=V, channel=channel, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    logits = (strong * torch.randn(x.g.shape, generator=generator)).to(dtype)
    beta = torch.randn(*(x.v.shape if per_value else x.beta.shape), generator=generator).to(dtype)
    A_log = torch.randn(HV, generator=generator)
    dt_bias = torch.randn(HV * K if channel else HV, generator=generator) if bias else None
    options = Options(
        decay="channel" if channel else "scalar",
        scale=0.3,
        gate=gate,
        lower_bound=-5.0 if gate == "bounded" else None,
        beta_sigmoid=True,
        beta_scale=beta_scale,
        state_v_first=v_first,
        output_final_state=True,
    )
    state = x.initial_state.mT.contiguous() if v_first else x.initial_state
    check(Tensors(x.q, x.k, x.v, logits, beta, A_log, dt_bias, state), options)


@pytest.mark.parametrize("v_first", [False, True])
def test_every_decay_at_once_and_none(v_first):
    x = make_inputs(B=2, T=3, K=12, V=20)
    gk, gv = -torch.rand(2, 3, 4, 12), -torch.rand(2, 3, 4, 20)
    state = x.initial_state.mT.contiguous() if v_first else x.initial_state
    some = Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, state, gk, gv)
    options = Options(decay="scalar", scale=1.0, state_v_first=v_first, output_final_state=True)
    check(some, options)
    check(some._replace(g=None, gk=None, gv=None), Options(decay="none", scale=1.0, state_v_first=v_first))


def test_strided_arguments_are_read_where_they_are():
    B, T, H, HV, K, V = 2, 3, 2, 4, 12, 20
    x = make_inputs(B=B, T=T, H=H, HV=HV, K=K, V=V)
    mixed = torch.randn(B, T, 2 * H * K + HV * V + HV)
    q, k, v, g = mixed.split([H * K, H * K, HV * V, HV], -1)
    q, k, v = q.view(B, T, H, K), k.view(B, T, H, K), v.view(B, T, HV, V)
    options = Options(decay="scalar", scale=1.0, qk_l2norm=True)
    check(Tensors(q, k, v, -g.abs(), x.beta, None, None, x.initial_state), options)
    # One that cannot be: channels are not next to one another.
    check(Tensors(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, x.g, x.beta, None, None, None), options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_in_place(dtype):
    x = make_inputs(B=2, T=2, K=16, V=24)
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, x.initial_state.to(dtype))
    options = Options(decay="scalar", scale=1.0, output_final_state=True)
    _, final, copies = run(tensors, options, inplace=True)
    assert final is copies.initial_state
    _, want, _ = reference_forward(Problem(double(tensors), options, None))
    assert rms_ratio(final, want) <= tolerance(2, 16, dtype)


def test_states_in_place_with_rows_that_are_not_contiguous():
    x = make_inputs(B=2, T=1, K=16, V=24)
    state = x.initial_state.mT.contiguous().mT
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, state)
    options = Options(decay="scalar", scale=1.0, output_final_state=True)
    _, final, copies = run(tensors, options, inplace=True)
    assert final is copies.initial_state
    _, want, _ = reference_forward(Problem(double(tensors), options, None))
    assert rms_ratio(final, want) <= tolerance(1, 16, torch.float32)


def test_out_receives_the_result():
    x = make_inputs(B=2, T=2, K=16, V=24)
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, None)
    options = Options(decay="scalar", scale=1.0, output_final_state=True)
    out = torch.full_like(x.v, torch.nan)
    o, _ = launch_recurrent(tensors, options, None, out=out, cores=2)
    assert o is out
    assert torch.equal(out, run(tensors, options)[0])


@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    channel=st.booleans(),
    v_first=st.booleans(),
    speculative=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_pool_of_states(lengths, channel, v_first, speculative, padded, seed):
    """Slots that are read, written and left alone; servers pad with slot -1."""
    generator = torch.Generator().manual_seed(seed)
    N, S, K, V = len(lengths), 4, 16, 20
    lengths = lengths if speculative else [min(n, 1) for n in lengths]
    bounds = [sum(lengths[:i]) for i in range(N + 1)]
    x = make_inputs(T=bounds[-1], K=K, V=V, channel=channel, sequences=N * S + 3, seed=seed)
    # Rows of the pool have other memory between them.
    pool = torch.full((N * S + 3, 5, *((V, K) if v_first else (K, V))), 1e30)[:, :4]
    pool.copy_(x.initial_state.mT if v_first else x.initial_state)
    indices = torch.randperm(N * S + 3, generator=generator)[: N * S].view(N, S)
    accepted = torch.randint(1, S + 1, (N,), generator=generator) if speculative else None
    if padded:
        indices[0] = -1
    options = Options(decay="channel" if channel else "scalar", scale=1.0, state_v_first=v_first)
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, pool)
    o, states, copies = run(
        tensors, options, bounds, inplace=True, indices=indices if speculative else indices[:, 0], accepted=accepted
    )
    assert states is copies.initial_state

    expected = pool.double()
    want = torch.zeros(o.shape, dtype=torch.float64)
    for n, (start, end) in enumerate(pairwise(bounds)):
        if padded and n == 0:
            continue
        state = expected[indices[n, 0 if accepted is None else accepted[n] - 1]][None].clone()
        for t in range(start, end):
            token = double(tensors)._replace(initial_state=state).map_tokens(lambda y, t=t: y[:, t : t + 1])
            step = Options(decay=options.decay, scale=1.0, state_v_first=v_first, output_final_state=True)
            out, state, _ = reference_forward(Problem(token, step, None))
            want[:, t] = out[:, 0]
            expected[indices[n, t - start]] = state[0]
    assert rms_ratio(o, want) <= tolerance(3, K, torch.float32)
    assert rms_ratio(states, expected) <= tolerance(3, K, torch.float32)
    written = {int(i) for n in range(N) for i in indices[n, : lengths[n]]}
    left_alone = [i for i in range(len(pool)) if i not in written]
    assert torch.equal(states[left_alone], pool[left_alone])


def test_later_slots_outside_of_the_pool_are_not_written():
    x = make_inputs(B=1, T=3, K=16, V=20, sequences=4)
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, x.initial_state)
    options = Options(decay="scalar", scale=1.0, output_final_state=True)
    _, states, _ = run(tensors, options, inplace=True, indices=torch.tensor([[1, -1, 4]]))
    first = double(tensors).map_tokens(lambda y: y[:, :1])._replace(initial_state=x.initial_state[1:2].double())
    _, want, _ = reference_forward(Problem(first, options, None))
    assert rms_ratio(states[1], want[0]) <= tolerance(1, 16, torch.float32)
    assert torch.equal(states[[0, 2, 3]], x.initial_state[[0, 2, 3]])


def test_rows_of_zeros_have_a_norm():
    x = make_inputs("zero rows", B=1, T=6, K=16, V=20, seed=1)
    assert (x.k[0, :, 0] == 0).all(-1).any() and (x.q[0, :, 0] == 0).all(-1).any()
    options = Options(decay="scalar", scale=1.0, qk_l2norm=True, output_final_state=True)
    check(Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, x.initial_state), options)


def test_a_pool_that_is_only_read():
    x = make_inputs(B=3, T=1, K=16, V=20, sequences=5)
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, x.initial_state)
    options = Options(decay="scalar", scale=1.0, output_final_state=True)
    o, final, copies = run(tensors, options, indices=torch.tensor([4, -1, 0]))
    assert torch.equal(copies.initial_state, x.initial_state)
    chosen = tensors._replace(initial_state=x.initial_state[[4, 0, 0]])
    want, want_final, _ = reference_forward(Problem(double(chosen), options, None))
    want[1], want_final[1] = 0, 0
    assert rms_ratio(o, want) <= tolerance(1, 16, torch.float32)
    assert rms_ratio(final, want_final) <= tolerance(1, 16, torch.float32)


@pytest.mark.parametrize("cores", [1, 5])
def test_every_number_of_programs_gives_the_same_bits(cores):
    x = make_inputs(B=3, T=2, K=16, V=64)
    tensors = Tensors(x.q, x.k, x.v, x.g, x.beta, None, None, x.initial_state)
    options = Options(decay="scalar", scale=1.0, output_final_state=True)
    for a, b in zip(run(tensors, options)[:2], run(tensors, options, cores=cores)[:2], strict=True):
        assert torch.equal(a, b)


@given(heads=st.integers(1, 4096), K=st.integers(1, 256), V=st.integers(1, 256), cores=st.sampled_from((1, 3, 40, 48)))
def test_tiles_fit_and_use_the_cores(heads, K, V, cores):
    width = value_tile(heads, K, V, cores)
    assert width & (width - 1) == 0
    assert width * (1 << (K - 1).bit_length()) <= max(decode_kernel.TILE, 256 * decode_kernel.MIN_TILE_VALUES)
    if heads * -(-V // 16) <= cores:
        assert width == 16


def test_builds_have_every_argument_once():
    for build in decode_kernel.builds():
        assert isinstance(build, KernelBuild)
        assert [*sorted({**build.signature, **build.constants})] == sorted(decode_kernel.recurrent_kernel.arg_names)
