"""The state cache."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from fla_npu.models.cache_utils import KEYS
from fla_npu.models.utils import Cache, FLACache, FLALayer


def filled(batch=3):
    cache = Cache()
    for i in range(2):
        rows = torch.arange(batch, dtype=torch.float32)[:, None] + 10 * i
        cache.update(recurrent_state=rows.clone(), conv_state=(rows + 100, None, [rows + 200]), layer_idx=i, offset=5)
    return cache


def test_update_keeps_references_and_old_states():
    cache, state, conv = Cache(), torch.zeros(2, 3), (torch.zeros(2, 1), None)
    entry = cache.update(recurrent_state=state, conv_state=conv, layer_idx=0, offset=7)
    assert set(entry) == set(KEYS) and entry is cache[0]
    assert entry["recurrent_state"] is state and entry["conv_state"] is conv and entry["ffn_state"] is None
    new = torch.ones(2, 3)
    cache.update(recurrent_state=new, ffn_state=new, layer_idx=0)
    cache.update(layer_idx=0, offset=None)
    assert cache[0]["recurrent_state"] is new and cache[0]["conv_state"] is conv and cache[0]["ffn_state"] is new
    assert cache.get_seq_length() == cache.get_seq_length(0) == cache.get_seq_length(None) == 9


def test_layers_are_counted_one_by_one():
    cache = Cache()
    assert len(cache) == 0 and cache.get_seq_length(3) == 0 and list(cache) == []
    cache.update(recurrent_state=torch.zeros(1), layer_idx=2, offset=4)
    assert len(cache) == 3 and [s is None for s in cache] == [True, True, False]
    assert cache.get_seq_length(2) == 4 and cache.get_seq_length(0) == 0
    assert cache.get_max_length() == cache.get_max_cache_shape() == -1
    with pytest.raises(KeyError, match=r"Cache only has 3 layers, attempted to access layer 3"):
        cache[3]


def test_attention_states_are_appended():
    cache = Cache()
    keys, values = torch.randn(2, 9, 3), torch.randn(2, 9, 4)
    for start, end in ((0, 5), (5, 6), (6, 9)):
        cache.update(attn_state=(keys[:, start:end], values[:, start:end]), offset=100)
    assert torch.equal(cache[0]["attn_state"][0], keys) and torch.equal(cache[0]["attn_state"][1], values)
    assert (
        cache.get_seq_length() == 9 and cache.get_mask_sizes(2, 0) == (11, 0) and cache.get_mask_sizes(2, 5) == (2, 0)
    )
    cache.crop(-2)
    assert torch.equal(cache[0]["attn_state"][0], keys[:, :7]) and cache.get_seq_length() == 7
    with pytest.raises(ValueError, match=r"`attn_state` must be a tuple or list of tensors, got Tensor"):
        cache.update(attn_state=keys)


def test_attention_window():
    cache, keys = Cache(), torch.randn(2, 9, 3)
    for start, end in ((0, 6), (6, 7), (7, 9)):
        cache.update(attn_state=(keys[:, start:end],), cache_kwargs={"window_size": 4})
        assert torch.equal(cache[0]["attn_state"][0], keys[:, max(end - 4, 0) : end])
    assert cache.get_mask_sizes(1, 0) == (4, 6)
    with pytest.raises(NotImplementedError, match="sliding window"):
        cache.crop(3)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        (lambda c: [layer.batch_select_indices(torch.tensor([1])) for layer in c.layers], [1]),
        (lambda c: [layer.batch_repeat_interleave(2) for layer in c.layers], [0, 0, 1, 1, 2, 2]),
    ],
)
def test_batch_changes_reach_every_tensor(change, rows):
    cache = filled()
    kept = cache[0]["recurrent_state"]
    change(cache)
    for i in range(2):
        expected = torch.tensor(rows, dtype=torch.float32)[:, None] + 10 * i
        first, none, (nested,) = cache[i]["conv_state"]
        assert torch.equal(cache[i]["recurrent_state"], expected) and none is None
        assert torch.equal(first, expected + 100) and torch.equal(nested, expected + 200)
    assert torch.equal(kept, torch.arange(3.0)[:, None]) and cache.get_seq_length() == 5


def test_batch_changes_refuse_what_they_cannot_copy():
    cache = filled()
    cache.update(ffn_state=object(), layer_idx=1)
    with pytest.raises(NotImplementedError, match="cannot reorder a state of type object"):
        cache.reorder_cache(torch.tensor([0, 0, 0]))
    assert cache[0]["recurrent_state"].flatten().tolist() == [0, 1, 2]


def test_crop_refuses_to_roll_recurrent_states_back():
    cache = filled()
    cache.update(attn_state=(torch.zeros(3, 5, 1),), layer_idx=2)
    for unchanged in (5, 9):
        cache.crop(unchanged)
    for length in (4, 0, -1):
        with pytest.raises(NotImplementedError, match="cannot roll recurrent_state and conv_state back from 5 tokens"):
            cache.crop(length)
    assert cache[2]["attn_state"][0].shape[1] == 5


def test_reset():
    cache = filled()
    cache.reset()
    assert len(cache) == 2 and cache[0] is None and cache.get_seq_length() == 0
    cache.reorder_cache(torch.tensor([0]))
    cache.crop(0)


def test_legacy_conversions():
    cache = filled()
    legacy = cache.to_legacy_cache()
    assert isinstance(legacy, tuple) and legacy[1]["recurrent_state"] is cache[1]["recurrent_state"]
    again = Cache.from_legacy_cache(legacy, seen_tokens=5)
    assert isinstance(again, Cache) and again.get_seq_length(1) == 5
    assert again[1]["conv_state"] is cache[1]["conv_state"] and again[0] is not cache[0]
    assert Cache.from_legacy_cache(cache) is cache
    assert len(Cache.from_legacy_cache(None)) == 0
    assert Cache.from_legacy_cache([None, legacy[0]])[0] is None

    class Old:
        states = legacy

        def get_seq_length(self):
            return 5

    assert Cache.from_legacy_cache(Old()).get_seq_length() == 5
    with pytest.raises(TypeError, match=r"Expected an FLA cache .* got dict"):
        Cache.from_legacy_cache({})


def test_offloading_is_refused():
    with pytest.raises(NotImplementedError, match="offloading"):
        Cache(offloading=True)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_is_one_of_transformers_caches():
    from transformers.cache_utils import Cache as TransformersCache
    from transformers.cache_utils import CacheLayerMixin

    cache = filled()
    assert isinstance(cache, TransformersCache) and issubclass(Cache, FLACache)
    assert all(isinstance(layer, CacheLayerMixin) and isinstance(layer, FLALayer) for layer in cache.layers)
    assert cache.is_initialized and not cache.is_compileable and "FLALayer" in repr(cache)


def test_works_without_transformers():
    code = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "import torch\n"
        "from fla_npu.layers import GatedDeltaNet\n"
        "from fla_npu.models.utils import Cache\n"
        "layer, cache = GatedDeltaNet(8, head_dim=4, num_heads=2, layer_idx=0).eval(), Cache()\n"
        "with torch.no_grad():\n"
        "    for T in (3, 1): layer(torch.randn(1, T, 8), past_key_values=cache, use_cache=True)\n"
        "cache.reorder_cache(torch.tensor([0, 0]))\n"
        "print(cache.get_seq_length(), *cache[0]['recurrent_state'].shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["4", "2", "2", "8", "4"], result.stderr
