"""The stand-in for the package `causal_conv1d`, against a convolution that is written down per sequence in float64."""

import pytest
import torch
import torch.nn.functional as F

from fla_npu.integrations.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

C, W = 6, 4


def defined(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """One sequence `[C, T]`, in float64."""
    x, weight = x.double(), weight.double()
    padded = F.pad(x, (weight.shape[1] - 1, 0))
    y = sum(weight[:, i, None] * padded[:, i : i + x.shape[1]] for i in range(weight.shape[1]))
    if bias is not None:
        y = y + bias.double()[:, None]
    return F.silu(y) if activation else y


def rms_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def inputs(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*shape, generator=generator),
        torch.randn(C, W, generator=generator),
        torch.randn(C, generator=generator),
    )


# fp32 with W + 1 terms: a few units of 2^-24.
TOLERANCE = 1e-6


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolution(activation, channels_last):
    x, weight, bias = inputs(2, C, 9)
    if channels_last:
        x = x.mT.contiguous().mT
    y = causal_conv1d_fn(x, weight, bias, activation=activation)
    expected = torch.stack([defined(row, weight, bias, activation) for row in x])
    assert rms_error(y, expected) < TOLERANCE


def test_sequences_by_seq_idx_in_every_row():
    x, weight, bias = inputs(2, C, 11)
    seq_idx = torch.tensor([[0] * 5 + [1] + [2] * 5, [7] * 2 + [3] * 9], dtype=torch.int32)
    y = causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx, activation="silu")
    rows = [
        torch.cat([defined(part, weight, bias, "silu") for part in row.split(lengths, dim=1)], dim=1)
        for row, lengths in zip(x, ([5, 1, 5], [2, 9]), strict=True)
    ]
    assert rms_error(y, torch.stack(rows)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sequences_by_the_bounds_that_transformers_passes(dtype):
    x, weight, _ = inputs(1, C, 11)
    y = causal_conv1d_fn(x, weight, cu_seq_lens_q=torch.tensor([0, 4, 5, 11], dtype=dtype))
    parts = [defined(part, weight, None, None) for part in x[0].split([4, 1, 6], dim=1)]
    assert rms_error(y[0], torch.cat(parts, dim=1)) < TOLERANCE


@pytest.mark.parametrize("by", ["seq_idx", "cu_seq_lens_q"])
def test_columns_before_the_first_token_are_its_context(by):
    x, weight, _ = inputs(1, C, 3 + 8)
    bounds = {"seq_idx": torch.tensor([[0] * 5 + [1] * 3]), "cu_seq_lens_q": torch.tensor([0, 5, 8])}[by]
    y = causal_conv1d_fn(x, weight, **{by: bounds})
    parts = [defined(part, weight, None, None) for part in x[0].split([8, 3], dim=1)]
    assert rms_error(y[0], torch.cat(parts, dim=1)) < TOLERANCE


def test_states_continue_a_sequence():
    x, weight, bias = inputs(2, C, 9)
    whole = causal_conv1d_fn(x, weight, bias, activation="silu")
    first, state = causal_conv1d_fn(x[..., :5], weight, bias, return_final_states=True, activation="silu")
    out = torch.empty_like(state)
    second, last = causal_conv1d_fn(
        x[..., 5:],
        weight,
        bias,
        initial_states=state,
        return_final_states=True,
        final_states_out=out,
        activation="silu",
    )
    torch.testing.assert_close(torch.cat([first, second], dim=-1), whole)
    assert torch.equal(state, x[..., 2:5]) and torch.equal(last, x[..., 6:]) and last is out


@pytest.mark.parametrize("length", [W - 1, W, W + 2])
@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_update(length, tokens):
    past, weight, bias = inputs(2, C, length)
    new = torch.randn(2, C, tokens or 1, generator=torch.Generator().manual_seed(9))
    state = past.clone()
    y = causal_conv1d_update(new if tokens else new[..., 0], state, weight, bias, "silu")
    everything = torch.cat([past, new], dim=-1)
    expected = torch.stack([defined(row, weight, bias, "silu") for row in everything])[..., length:]
    assert y.shape == (new.shape if tokens else (2, C))
    assert rms_error(y.view_as(expected), expected) < TOLERANCE
    assert torch.equal(state, everything[..., -length:])


@pytest.mark.parametrize("length", [W - 1, W, 7])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("ring", [False, True])
def test_update_of_rings_and_pools(length, pool, ring):
    """Sequences that go on piece by piece, some pieces longer than the state; slots that nobody names stay."""
    x, weight, bias = inputs(3, C, 25, seed=4)
    slots = torch.tensor([4, 0, 3], dtype=torch.int32)
    done = torch.tensor([0, 5, 11], dtype=torch.int32)  # tokens that a ring has seen before are zeros here
    states = torch.full((6, C, length), 7.0)
    states[slots.long()] = 0.0
    state = states if pool else states[slots.long()]
    pieces, start = [], 0
    for count in (1, 3, 9, 1, 2, 9):
        options = {"conv_state_indices": slots} if pool else {}
        if ring:
            options["cache_seqlens"] = done + start
        pieces.append(causal_conv1d_update(x[..., start : start + count], state, weight, bias, "silu", **options))
        start += count
    expected = torch.stack([defined(row, weight, bias, "silu") for row in x])
    assert rms_error(torch.cat(pieces, dim=-1), expected) < TOLERANCE
    last = [row.roll(int(n) + 25, dims=1) if ring else row for row, n in zip(x[..., -length:], done, strict=True)]
    assert torch.equal(states[slots.long()] if pool else state, torch.stack(last))
    if pool:
        assert (states[[1, 2, 5]] == 7.0).all()


def test_update_without_a_slot():
    """A negative slot is padding of a batch."""
    x, weight, bias = inputs(3, C, 1)
    states = torch.randn(2, C, W, generator=torch.Generator().manual_seed(1))
    before = states.clone()
    y = causal_conv1d_update(x[..., 0], states, weight, bias, conv_state_indices=torch.tensor([-1, 1, -1]))
    alone = causal_conv1d_update(x[1:2, :, 0], before[1:].clone(), weight, bias)
    assert not y[[0, 2]].any() and torch.equal(y[1:2], alone)
    assert torch.equal(states[0], before[0]) and not torch.equal(states[1], before[1])


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_states_of_short_sequences_keep_what_was_before(tokens):
    x, weight, bias = inputs(2, C, tokens)
    before = torch.randn(2, C, W - 1, generator=torch.Generator().manual_seed(1))
    y, state = causal_conv1d_fn(x, weight, bias, initial_states=before, return_final_states=True)
    everything = torch.cat([before, x], dim=-1)
    assert y.shape == x.shape and torch.equal(state, everything[..., tokens:])
    state = before.clone()
    assert causal_conv1d_update(x, state, weight, bias).shape == x.shape
    assert torch.equal(state, everything[..., tokens:])
    assert causal_conv1d_fn(x, weight, bias, seq_idx=torch.zeros(2, tokens, dtype=torch.int32)).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_other_dtypes(dtype):
    """Weight and states in float32, inputs in half precision."""
    x, weight, bias = inputs(2, C, 9)
    x, before = x.to(dtype), torch.randn(2, C, W - 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.empty(2, C, W - 1)
    y, state = causal_conv1d_fn(x, weight, bias, None, before.float(), True, out, "silu")
    whole = torch.stack([defined(row, weight, bias, "silu") for row in torch.cat([before, x], dim=-1)])[..., W - 1 :]
    # Half a unit of the output's dtype, and the rounding of float32 sums.
    eps = torch.finfo(dtype).eps / 2
    assert y.dtype == dtype and ((y.double() - whole).abs() <= whole.abs() * eps + 1e-5).all()
    assert state is out and torch.equal(out, x[..., -(W - 1) :].float())
    rest, kept = causal_conv1d_update(x[..., 5:], out, weight, bias), out
    assert rest.dtype == dtype and torch.equal(kept, x[..., -(W - 1) :].float())


def test_a_float32_weight_with_bfloat16_inputs_rounds_once():
    x, weight, bias = inputs(1, C, 9)
    x = x.bfloat16()
    y = causal_conv1d_fn(x, weight, bias, activation="silu")
    assert y.dtype == torch.bfloat16
    # Half a unit of bfloat16 is 2^-9 at most.
    expected = defined(x[0], weight, bias, "silu")
    assert ((y[0].double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()


def test_gradients():
    x, weight, bias = (t.double().requires_grad_() for t in inputs(1, C, 7))
    bounds = torch.tensor([0, 3, 7])
    assert torch.autograd.gradcheck(
        lambda *a: causal_conv1d_fn(*a, activation="silu", cu_seq_lens_q=bounds), (x, weight, bias)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(C, 5)}, "x must be"),
        ({"final_states_out": torch.zeros(1, C, W - 1)}, "return_final_states"),
        ({"seq_idx": torch.zeros(1, 4)}, None),
        ({"seq_idx": torch.zeros(2, 5)}, "seq_idx must be"),
        ({"seq_idx": torch.zeros(1, 6)}, "seq_idx must be"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "cu_seqlens"),
        ({"cu_seq_lens_q": torch.tensor([0, 5]), "return_final_states": True}, "packed"),
        ({"activation": "gelu"}, "gelu"),
        ({"initial_states": torch.zeros(1, C, W)}, r"initial_states must be \[B, C, W - 1\] = \[1, 6, 3\]"),
        ({"final_states_out": torch.zeros(2, C, W - 1), "return_final_states": True}, "final_states_out must be"),
        ({"weight": torch.zeros(C + 1, W)}, "weight"),
    ],
)
def test_refuses(change, message):
    arguments = {"x": torch.zeros(1, C, 5), "weight": torch.zeros(C, W), **change}
    if message is None:
        causal_conv1d_fn(**arguments)
        return
    with pytest.raises(ValueError, match=message):
        causal_conv1d_fn(**arguments)


def test_update_refuses():
    x, weight = torch.zeros(2, C), torch.zeros(C, W)
    with pytest.raises(ValueError, match="conv_state must be"):
        causal_conv1d_update(x, torch.zeros(2, C, W - 2), weight)
    with pytest.raises(ValueError, match="conv_state must be"):
        causal_conv1d_update(x, torch.zeros(1, C, W), weight)
    for name in ("cache_seqlens", "conv_state_indices"):
        for integers in (torch.zeros(2), torch.zeros(3, dtype=torch.int32)):
            with pytest.raises(ValueError, match=rf"{name} must be integers \[2\]"):
                causal_conv1d_update(x, torch.zeros(2, C, W), weight, **{name: integers})
    with pytest.raises(ValueError, match=r"conv_state must be \[slots, 6, S\]"):
        causal_conv1d_update(x, torch.zeros(5, C + 1, W), weight, conv_state_indices=torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        causal_conv1d_update(x, torch.zeros(5, C, W), weight, conv_state_indices=torch.tensor([0, 5]))
