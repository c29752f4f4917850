"""The causal convolution against its definition in fp64, in pieces against one pass, and its gradients."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.errors import ShapeError
from fla_npu.modules import ShortConvolution, blockwise
from fla_npu.modules.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_update,
    causal_conv1d_update_states,
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1 << 18, 24], ids=["one block", "many blocks"])
def block_elements(request, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", request.param)


def definition(x, weight, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None):
    """y and the final state, token by token in fp64."""
    B, T, D = x.shape
    W = weight.shape[1]
    bounds = [(b, 0, T) for b in range(B)] if cu_seqlens is None else [(0, s, e) for s, e in pairwise(cu_seqlens)]
    y, states = torch.zeros(B, T, D, dtype=torch.float64), []
    for n, (b, start, end) in enumerate(bounds):
        state = torch.zeros(D, W, dtype=torch.float64) if initial_state is None else initial_state[n].double()
        for t in range(start, end):
            state = torch.cat([state[:, 1:], x[b, t].double()[:, None]], 1)
            out = (state * weight.double()).sum(1)
            out = out if bias is None else out + bias.double()
            out = out if activation is None else out * torch.sigmoid(out)
            y[b, t] = out if residual is None else out + residual[b, t].double()
        states.append(state)
    return y, torch.stack(states)


@st.composite
def calls(draw):
    """Keyword arguments of a call, and bounds as a list or None."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    D, W = draw(st.integers(1, 9)), draw(st.integers(1, 5))

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if draw(st.booleans()):
        lens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
        bounds = [sum(lens[:i]) for i in range(len(lens) + 1)]
        B, T, N = 1, bounds[-1], len(lens)
    else:
        B, T = draw(st.integers(1, 3)), draw(st.integers(0, 14))
        bounds, N = None, B
    layout = draw(st.sampled_from(["contiguous", "slice of channels", "time last", "every second token"]))
    x = {
        "contiguous": lambda: rand(B, T, D),
        "slice of channels": lambda: rand(B, T, 3 * D)[..., D : 2 * D],
        "time last": lambda: rand(B, D, T).mT,
        "every second token": lambda: rand(B, 2 * T, D)[:, ::2],
    }[layout]()
    cu_seqlens = None
    if bounds is not None:
        cu_seqlens = torch.tensor(bounds, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    return {
        "x": x,
        "weight": rand(D, W),
        "bias": rand(D) if draw(st.booleans()) else None,
        "residual": rand(B, T, D) if draw(st.booleans()) else None,
        "initial_state": rand(N, D, W) if draw(st.booleans()) else None,
        "activation": draw(st.sampled_from([None, "silu", "swish"])),
        "cu_seqlens": cu_seqlens,
    }, bounds


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("elements", [1 << 18, 12])
def test_matches_the_definition(elements, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)

    @settings(max_examples=150, deadline=None)
    @given(calls())
    def check(call):
        call, bounds = call
        kept = {k: v.clone() for k, v in call.items() if isinstance(v, torch.Tensor)}
        y, state = causal_conv1d(**call, output_final_state=True)
        expected, expected_state = definition(**{**call, "cu_seqlens": bounds})
        limit = TOLERANCE[call["x"].dtype]
        assert y.dtype == state.dtype == call["x"].dtype
        assert y.is_contiguous() and state.is_contiguous()
        torch.testing.assert_close(y.double(), expected, rtol=limit, atol=limit)
        torch.testing.assert_close(state.double(), expected_state, rtol=0, atol=0)
        for name, tensor in kept.items():
            assert torch.equal(call[name], tensor), name
        alone = causal_conv1d_update_states(
            call["x"], call["weight"].shape[1], call["initial_state"], call["cu_seqlens"]
        )
        assert torch.equal(alone, state)

    check()


@pytest.mark.parametrize("cuts", [[7], [1, 2, 3], [0, 5, 5, 12], list(range(1, 13))])
@pytest.mark.parametrize("grad", [False, True])
def test_in_pieces_equals_one_pass(cuts, grad):
    torch.manual_seed(0)
    conv = ShortConvolution(6, 4, bias=True)
    x, residual = torch.randn(2, 13, 6), torch.randn(2, 13, 6)
    whole, final = conv(x, residual=residual, output_final_state=True)
    state, pieces = None, []
    with torch.set_grad_enabled(grad):
        for start, end in pairwise([0, *cuts, 13]):
            y, state = conv(x[:, start:end], residual=residual[:, start:end], cache=state, output_final_state=True)
            pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(state, final)


@pytest.mark.parametrize("shape", [(3, 6), (3, 1, 6), (1, 3, 6)])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_update_is_one_token_in_place(shape, cache_dtype):
    torch.manual_seed(0)
    x, residual, bias, weight = torch.randn(shape), torch.randn(shape), torch.randn(6), torch.randn(6, 4)
    cache = torch.randn(3, 6, 4).to(cache_dtype)
    before = cache.clone()
    y, returned = causal_conv1d_update(x, cache, residual, weight, bias, "silu")
    expected, state = definition(
        x.view(3, 1, 6), weight, bias, residual.view(3, 1, 6), initial_state=before, activation="silu"
    )
    assert returned is cache and y.shape == shape and y.dtype == x.dtype
    torch.testing.assert_close(y.double().view(3, 1, 6), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cache, state.to(cache_dtype))


def test_update_writes_through_a_view():
    pool = torch.zeros(5, 6, 8)
    causal_conv1d_update(torch.ones(2, 6), pool[1:3, :, ::2], weight=torch.ones(6, 4))
    assert pool.sum() == 12 and bool((pool[1:3, :, 6] == 1).all())


@pytest.mark.parametrize("packed", [False, True])
def test_module_steps_in_place_only_without_autograd(packed):
    conv = ShortConvolution(6, 4)
    x = torch.randn(1, 3, 6) if packed else torch.randn(3, 1, 6)
    cu_seqlens = torch.arange(4) if packed else None
    cache = torch.randn(3, 6, 4)
    before = cache.clone()
    y, state = conv(x, cache=cache, output_final_state=True, cu_seqlens=cu_seqlens)
    assert state is not cache and torch.equal(cache, before)
    with torch.no_grad():
        stepped, stepped_state = conv(x, cache=cache, output_final_state=True, cu_seqlens=cu_seqlens)
    assert stepped_state is cache and torch.equal(cache, state)
    torch.testing.assert_close(stepped, y)
    with torch.no_grad():
        assert conv(x, cache=cache, cu_seqlens=cu_seqlens)[1] is None


def test_as_many_tokens_as_sequences_is_not_always_a_step():
    conv = ShortConvolution(6, 3)
    x, cu_seqlens, cache = torch.randn(1, 3, 6), torch.tensor([0, 2, 2, 3]), torch.randn(3, 6, 3)
    before = cache.clone()
    with torch.no_grad():
        y, state = conv(x, cache=cache, output_final_state=True, cu_seqlens=cu_seqlens)
    expected, expected_state = definition(
        x, conv.weight.detach()[:, 0], initial_state=before, activation="silu", cu_seqlens=[0, 2, 2, 3]
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state.double(), expected_state) and torch.equal(cache, before)


def test_state_is_never_a_view_of_x():
    """A decode step writes into the state."""
    for shape, W in (((2, 4, 1), 4), ((1, 3, 5), 1), ((1, 1, 1), 1), ((3, 4, 4), 4)):
        x = torch.randn(shape)
        _, state = causal_conv1d(x, torch.randn(shape[2], W), output_final_state=True)
        assert state.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_gradients(packed, width, block_elements):
    torch.manual_seed(width)
    N, D = 3, 5

    def rand(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    x = rand(1, 9, D) if packed else rand(N, 9, D)
    inputs = (x, rand(D, width), rand(D), rand(*x.shape), rand(N, D, width))
    cu_seqlens = torch.tensor([0, 1, 1, 9]) if packed else None

    def conv(x, weight, bias, residual, state):
        return causal_conv1d(x, weight, bias, residual, state, True, "silu", cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(conv, inputs)


def test_block_gradients_are_rounded_once(monkeypatch):
    """Gradients of rows that two blocks see, in bf16: those of the same call in one block."""
    torch.manual_seed(0)
    inputs = [torch.randn(s).bfloat16().requires_grad_() for s in ((2, 40, 8), (8, 4), (8,), (2, 40, 8))]
    dy = torch.randn(2, 40, 8).bfloat16()
    expected = torch.autograd.grad(causal_conv1d(*inputs, activation="silu")[0], inputs, dy)
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 40)
    dy_before = dy.clone()
    grads = torch.autograd.grad(causal_conv1d(*inputs, activation="silu")[0], inputs, dy)
    assert torch.equal(dy, dy_before)
    for grad, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=2**-8, atol=1e-6)


def test_heads_are_flattened():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 3, 4), torch.randn(12, 4)
    y, _ = causal_conv1d(x, weight, residual=x)
    assert torch.equal(y, causal_conv1d(x.flatten(2), weight, residual=x.flatten(2))[0].view_as(x))


def test_mask_leaves_x_alone():
    torch.manual_seed(0)
    conv, x = ShortConvolution(6, 4), torch.randn(2, 5, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    before = x.clone()
    y, _ = conv(x, mask=mask)
    assert torch.equal(x, before)
    assert torch.equal(y, conv(x * mask[..., None])[0])


def test_a_sequence_does_not_see_its_neighbours():
    x = torch.randn(1, 10, 4)
    x[:, 3:6] = float("nan")
    y, state = causal_conv1d(
        x, torch.randn(4, 4), output_final_state=True, cu_seqlens=torch.tensor([0, 3, 6, 6, 7, 10])
    )
    assert y[:, :3].isfinite().all() and y[:, 6:].isfinite().all()
    assert state[[0, 2, 3, 4]].isfinite().all()


def test_parameters_and_size():
    conv = ShortConvolution(6, 4, bias=True, dtype=torch.bfloat16, use_fast_conv1d=True)
    assert [(n, tuple(p.shape), p.dtype) for n, p in conv.named_parameters()] == [
        ("weight", (6, 1, 4), torch.bfloat16),
        ("bias", (6,), torch.bfloat16),
    ]
    assert not list(conv.buffers()) and conv.state_size == 24
    assert "activation=silu" in repr(conv)
    torch.manual_seed(0)
    ours = ShortConvolution(6, 4).weight
    torch.manual_seed(0)
    assert torch.equal(ours, torch.nn.Conv1d(6, 6, 4, groups=6, bias=False).weight)


def test_a_wide_weight_does_not_widen_the_output():
    x = torch.randn(1, 6, 4).bfloat16()
    y, state = causal_conv1d(x, torch.randn(4, 3), torch.randn(4), output_final_state=True)
    assert y.dtype == state.dtype == torch.bfloat16


X, WEIGHT = torch.zeros(2, 5, 6), torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: causal_conv1d(X), ShapeError, r"weight is required"),
        (lambda: causal_conv1d(X, WEIGHT[0]), ShapeError, r"weight must be \[D, W\], got \(4,\)"),
        (lambda: causal_conv1d(X, WEIGHT[:3]), ShapeError, r"x has 6 channels but weight \(3, 4\) has 3"),
        (lambda: causal_conv1d(X[0], WEIGHT), ShapeError, r"x must be \[B, T, D\], got \(5, 6\)"),
        (lambda: causal_conv1d(X, WEIGHT, X[0, 0, :1]), ShapeError, r"bias must be \[6\], got \(1,\)"),
        (lambda: causal_conv1d(X, WEIGHT, residual=X[:1]), ShapeError, r"residual must have the shape of x"),
        (lambda: causal_conv1d(X, WEIGHT, activation="gelu"), ShapeError, r"'gelu' is not supported"),
        (lambda: causal_conv1d(X, WEIGHT, backend="cudnn"), ValueError, r"Unsupported backend: 'cudnn'"),
        (lambda: causal_conv1d(X, WEIGHT, cp_context=1), NotImplementedError, r"context parallelism"),
        (
            lambda: causal_conv1d(X, WEIGHT, initial_state=torch.zeros(2, 6, 3)),
            ShapeError,
            r"initial_state must be \[N, D, W\] = \[2, 6, 4\], got \[2, 6, 3\]",
        ),
        (lambda: causal_conv1d(X, WEIGHT, cu_seqlens=torch.tensor([0, 5])), ShapeError, r"batch size of 1, got 2"),
        (
            lambda: causal_conv1d_update(torch.zeros(2, 3, 6), torch.zeros(6, 6, 4), weight=WEIGHT),
            ShapeError,
            r"Unsupported input shape: \(2, 3, 6\)",
        ),
        (
            lambda: causal_conv1d_update(torch.zeros(2, 6), torch.zeros(3, 6, 4), weight=WEIGHT),
            ShapeError,
            r"cache must be \[N, D, W\] = \[2, 6, 4\], got \[3, 6, 4\]",
        ),
        (lambda: ShortConvolution(6, 4, activation="gelu"), AssertionError, r"'gelu' is not supported"),
        (lambda: ShortConvolution(6, 4, backend="mix"), ValueError, r"Invalid backend: 'mix'"),
        (
            lambda: ShortConvolution(6, 4)(X[:1], mask=X[:1, :, 0], cu_seqlens=torch.tensor([0, 5])),
            ValueError,
            r"`mask` and `cu_seqlens` cannot be provided at the same time",
        ),
    ],
)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_silu_matches_torch():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 300, 16), torch.randn(16, 4)
    expected = F.silu(F.conv1d(x.mT, weight[:, None], padding=3, groups=16)[..., :300]).mT
    torch.testing.assert_close(causal_conv1d(x, weight, activation="silu")[0], expected)


@pytest.mark.parametrize(
    "bounds", [[0, 5], [1, 6], [0], [0, 7], [0, 4, 2, 6], [0, -1, 6], torch.tensor([0.0, 6.0])], ids=str
)
def test_bounds_that_are_none_of_the_input(bounds):
    with pytest.raises(ValueError, match="cu_seqlens"):
        causal_conv1d(torch.ones(1, 6, 3), torch.ones(3, 4), cu_seqlens=torch.as_tensor(bounds))


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 4, 9]])
def test_forward_and_backward_on_their_own(bounds, with_state):
    torch.manual_seed(0)
    B, N = (2, 2) if bounds is None else (1, 2)
    x, residual, dy = (torch.randn(B, 9, 3, dtype=torch.float64) for _ in range(3))
    weight, bias = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    state, dht = (torch.randn(N, 3, 4, dtype=torch.float64) if with_state else None for _ in range(2))
    leaves = [t for t in (x, weight, bias, residual, state) if t is not None]
    y, final_state = definition(*(t.requires_grad_() for t in leaves), activation="silu", cu_seqlens=bounds)
    wanted = torch.autograd.grad((y, final_state) if with_state else y, leaves, (dy, dht) if with_state else dy)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    got_y, got_state = causal_conv1d_fwd(x, weight, bias, residual, state, True, "silu", cu_seqlens)
    assert not got_y.requires_grad
    torch.testing.assert_close(got_y, y.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_state, final_state.detach(), rtol=1e-12, atol=1e-12)
    got = causal_conv1d_bwd(x, dy, dht, weight, bias, residual, state, "silu", cu_seqlens)
    assert len(got) == 5 and (got[4] is None) == (state is None)
    for a, b in zip(got, wanted, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
