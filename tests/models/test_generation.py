"""`generate` with the state cache: every strategy gives what it gives without a cache."""

import pytest
import torch
from transformers import DynamicCache

from fla_npu.models.modeling_utils import CACHE
from fla_npu.models.utils import Cache, LegacyFLACache
from tests.models.tiny import KINDS, make, tokens

NEW = 8
STRATEGIES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beams": {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
}


def generate(model, x, **options):
    torch.manual_seed(3)
    # Without a mask, transformers takes every token 0, which the model may well produce, for padding.
    options = {"attention_mask": torch.ones_like(x)} | options
    return model.generate(x, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_cached_like_uncached(kind, strategy):
    model, x = make(kind), tokens(2, 11)
    cached = generate(model, x, **STRATEGIES[strategy])
    assert cached.shape[1] == 11 + NEW and torch.equal(cached[0, :11], x[0])
    assert torch.equal(cached, generate(model, x, use_cache=False, **STRATEGIES[strategy]))


def test_beams_move_their_states():
    """Beams that change places are what reordering is for: without it the test above must fail."""
    model, x = make("gdn hybrid"), tokens(2, 11)
    seen = []
    reorder = Cache.reorder_cache

    class Watched(Cache):
        def reorder_cache(self, beam_idx):
            seen.append(beam_idx.tolist())
            reorder(self, beam_idx)

    generate(model, x, **{CACHE: Watched()}, **STRATEGIES["beams"])
    assert any(order != sorted(order) or len(set(order)) < len(order) for order in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_left_padded_batch(kind):
    model, x = make(kind), tokens(2, 12)
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    together = generate(model, x.masked_fill(mask == 0, 0), attention_mask=mask, do_sample=False)
    for i in range(2):
        assert torch.equal(together[i, 12:], generate(model, x[i : i + 1, mask[i].bool()], do_sample=False)[0, -NEW:])


@pytest.mark.parametrize("kind", ["gdn window", "kda hybrid"])
def test_continued_from_a_cache(kind):
    model, x = make(kind), tokens(2, 12)
    expected = generate(model, x, do_sample=False)
    with torch.no_grad():
        cache = model(x[:, :7], use_cache=True)[CACHE]
    out = generate(model, x, **{CACHE: cache}, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert out[CACHE] is cache and cache.get_seq_length() == 12 + NEW - 1
    longer = torch.cat([expected, tokens(2, 3, seed=9)], dim=1)
    assert torch.equal(
        generate(model, longer, **{CACHE: cache}, do_sample=False), generate(model, longer, do_sample=False)
    )


def test_foreign_cache_is_refused():
    with pytest.raises(
        TypeError, match="Expected an FLA cache or a sequence of FLA state dictionaries, got DynamicCache"
    ):
        generate(make("gdn"), tokens(), **{CACHE: DynamicCache()})


def test_legacy_cache_is_taken():
    model, x = make("kda hybrid"), tokens(2, 12)
    old = LegacyFLACache()
    with torch.no_grad():
        for state in model(x[:, :7], use_cache=True)[CACHE]:
            old.update(**state, layer_idx=len(old), offset=7)
        assert [state is old[i] for i, state in enumerate(old.states)] == [True] * 3
        out = model(x[:, 7:], past_key_values=old, use_cache=True)
        assert type(out[CACHE]) is Cache and out[CACHE].get_seq_length() == 12
        torch.testing.assert_close(out.logits, model(x).logits[:, 7:], rtol=1e-4, atol=1e-5)
