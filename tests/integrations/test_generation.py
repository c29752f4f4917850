"""Greedy generation over the hook: pieces, comparison, who served the calls."""

import pytest
import torch
import transformers

import fla_npu
from fla_npu.integrations.generation import Generation, compare, generate, run_served, run_torch_path
from fla_npu.integrations.transformers import torch_path
from tests.tiny_models import tiny_model


class TestGeneration:
    @pytest.mark.parametrize("family", ["Qwen3_5", "KimiLinear"])
    @pytest.mark.parametrize("piece", [1, 7, 64])
    def test_prefill_in_pieces_equals_one_prefill(self, family, piece):
        model = tiny_model(family)
        ids = torch.randint(3, 512, (1, 71), generator=torch.Generator().manual_seed(6))
        seen = []
        whole = run_served(model, ids, max_new_tokens=4, piece=1000, keep_logits=True)
        pieces = run_served(model, ids, max_new_tokens=4, piece=piece, keep_logits=True, on_piece=seen.append)
        assert sum(seen) == 71
        assert whole.prefill_logits.shape == pieces.prefill_logits.shape == (71, 512)
        comparison = compare(whole, pieces)
        assert comparison.tokens_agree
        assert comparison.max_logit_difference < 1e-5

    def test_agrees_with_the_generation_of_transformers(self):
        model = tiny_model("Qwen3_5")
        ids = torch.randint(3, 512, (1, 20), generator=torch.Generator().manual_seed(7))
        run = run_served(model, ids, max_new_tokens=8, piece=8)
        with torch_path():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
        assert run.tokens == expected[0, 20:].tolist()
        assert run.forwards == 3 + len(run.tokens) - 1
        assert sum(run.calls.values()) == 3 * run.forwards

    def test_stops_at_the_end_token(self):
        model = tiny_model("Qwen3_5")
        ids = torch.randint(3, 512, (1, 20), generator=torch.Generator().manual_seed(7))
        with fla_npu.enabled():
            tokens = generate(model, ids, max_new_tokens=8, piece=64).tokens
            model.generation_config.eos_token_id = [tokens[3]]
            assert generate(model, ids, max_new_tokens=8, piece=64).tokens == tokens[: tokens.index(tokens[3]) + 1]

    def test_the_torch_path_is_counted_too(self):
        model = tiny_model("KimiLinear")
        run = run_torch_path(model, torch.full((1, 5), 9), max_new_tokens=3, piece=64)
        assert run.calls == {"chunk_kimi_delta_attention": 3, "recurrent_kimi_delta_attention": 6}

    def test_a_model_without_linear_attention_is_refused(self):
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config).eval()
        with pytest.raises(RuntimeError, match="served 0 linear-attention calls"):
            run_served(model, torch.full((1, 5), 9), max_new_tokens=2, piece=64)

    def test_comparison_stops_at_the_first_different_token(self):
        def run(tokens: list[int], decode: list[list[float]]) -> Generation:
            return Generation(tokens, torch.zeros(1, 2), torch.tensor(decode), 1, 1.0, 1.0, len(tokens))

        comparison = compare(
            run([1, 0, 1], [[0.0, 1.0], [5.0, 0.0]]),
            run([1, 1, 1], [[0.5, 1.0], [0.0, 0.0]]),
        )
        assert not comparison.tokens_agree
        assert comparison.agreeing_tokens == 1
        assert comparison.max_logit_difference == 0.5
