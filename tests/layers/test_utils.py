"""Padded batches to packed sequences and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.layers import utils
from fla_npu.layers.utils import (
    get_layer_cache,
    get_unpad_data,
    get_unpad_indices_and_cu,
    index_first_axis,
    index_put_first_axis,
    pad_input,
    repad_hidden_states,
    require_cache_layer_idx,
    unpad_hidden_states,
    unpad_input,
    update_layer_cache,
)
from fla_npu.models.utils import Cache

MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_get_unpad_data(dtype):
    indices, cu_seqlens, longest = get_unpad_data(MASK.to(dtype))
    assert indices.tolist() == [1, 2, 3, 4, 5] and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 3, 5, 5] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and isinstance(longest, int)


def test_only_the_last_columns_count():
    indices, cu_seqlens = get_unpad_indices_and_cu(MASK, 3)
    assert indices.tolist() == [0, 1, 2, 3] and cu_seqlens.tolist() == [0, 3, 4, 4]
    indices, cu_seqlens = get_unpad_indices_and_cu(MASK, 0)
    assert indices.tolist() == [] and cu_seqlens.tolist() == [0, 0, 0, 0]


def test_a_mask_changed_in_place_is_read_again():
    mask = torch.ones(2, 3)
    assert not utils.has_padding(mask, 3) and get_unpad_data(mask)[2] == 3
    mask[:, 0] = 0
    assert utils.has_padding(mask, 3) and not utils.has_padding(mask, 2) and get_unpad_data(mask)[2] == 2


@settings(max_examples=50, deadline=None)
@given(
    mask=st.integers(1, 4).flatmap(
        lambda T: st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=1, max_size=4)
    ),
    trailing=st.sampled_from([(), (3,), (2, 3)]),
)
def test_unpad_and_repad_are_inverses(mask, trailing):
    mask = torch.tensor(mask)
    B, T = mask.shape
    x = torch.randn(B, T, *trailing or (1,))
    packed, indices, cu_seqlens = unpad_hidden_states(x, None, mask, T)
    assert torch.equal(packed[0], x[mask])
    assert cu_seqlens.diff().tolist() == mask.sum(1).tolist()
    kept = torch.where(mask.view(B, T, *[1] * (x.ndim - 2)), x, 0)
    assert torch.equal(repad_hidden_states(packed, indices, B, T), kept)


def test_nothing_to_unpad():
    x, cu_seqlens = torch.randn(1, 4, 3), torch.tensor([0, 4])
    assert unpad_hidden_states(x, None, None, 4) == (x, None, None)
    assert unpad_hidden_states(x, cu_seqlens, MASK[:1], 4) == (x, None, cu_seqlens)
    assert repad_hidden_states(x, None, 1, 4) is x


def test_gradients():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 1])
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), (x,))
    assert torch.autograd.gradcheck(lambda x: index_put_first_axis(x, torch.tensor([4, 1, 0, 6, 2]), 8), (x,))
    assert torch.autograd.gradcheck(lambda x: pad_input(x, torch.tensor([0, 3, 4, 5, 1]), 2, 3), (x,))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("q_len", [4, 1])
def test_unpad_input(keepdim, as_tuple, q_len):
    q, k, v = torch.randn(3, q_len, 2, 5), torch.randn(3, 4, 2, 5), torch.randn(3, 4, 6)
    out, states, indices, (cu_q, cu_k), (max_q, max_k) = unpad_input(
        (q, q + 1) if as_tuple else q, (k, v), MASK, q_len, keepdim=keepdim
    )
    first = out[0] if as_tuple else out
    expected = q[:, 0] if q_len == 1 else q[MASK.bool()]
    assert isinstance(out, tuple) == as_tuple
    assert torch.equal(first, expected[None] if keepdim else expected)
    if as_tuple:
        assert torch.equal(out[1], first + 1)
    for state, whole in zip(states, (k, v), strict=True):
        assert torch.equal(state, whole[MASK.bool()][None] if keepdim else whole[MASK.bool()])
    assert cu_k.tolist() == [0, 3, 5, 5] and max_k == 3
    assert cu_q.tolist() == ([0, 1, 2, 3] if q_len == 1 else [0, 3, 5, 5]) and max_q == (1 if q_len == 1 else 3)
    padded = pad_input(expected, indices, 3, q_len)
    assert torch.equal(padded, q if q_len == 1 else torch.where(MASK.bool()[..., None, None], q, 0))


def test_unpad_input_refuses_other_lengths():
    q, k = torch.randn(3, 2, 5), torch.randn(3, 4, 5)
    with pytest.raises(NotImplementedError, match=r"q_len == 1 \(decoding\), got 2 and 4"):
        unpad_input(q, (k,), MASK, 2)


def test_layer_cache_helpers():
    module = torch.nn.Linear(1, 1)
    assert require_cache_layer_idx(module, None) is None and get_layer_cache(module, None) is None
    assert update_layer_cache(module, None, offset=1) is None
    cache = Cache()
    for call in (require_cache_layer_idx, get_layer_cache, update_layer_cache):
        with pytest.raises(ValueError, match=r"Linear requires `layer_idx` when `past_key_values` is provided"):
            call(module, cache)
    module.layer_idx = 1
    assert get_layer_cache(module, cache) is None
    state = torch.zeros(1)
    assert update_layer_cache(module, cache, recurrent_state=state, offset=3)["recurrent_state"] is state
    assert get_layer_cache(module, cache)["recurrent_state"] is state and cache.get_seq_length(1) == 3
