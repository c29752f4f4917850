"""The hook into transformers: who serves the calls, that the numbers stay, and that nothing is left behind."""

import sys

import pytest
import torch
import transformers

from fla_npu.errors import MissingExtraError
from fla_npu.integrations import transformers as hook
from fla_npu.integrations.generation import Generation, compare, generate, run_served, run_torch_path
from tests.tiny_models import CONFIGS, tiny_model

CHUNK_AND_STEP = {
    "Qwen3_5": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "Qwen3Next": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "OlmoHybrid": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "KimiLinear": ("chunk_kda", "fused_recurrent_kda"),
}


@pytest.fixture(autouse=True)
def one_thread_and_no_hook():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    hook.disable()
    torch.set_num_threads(threads)


def standard_experiment(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a 2 x 100-token forward, and 6 greedy tokens after 10: the experiment whose call counts are known."""
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        logits = model(torch.randint(3, 512, (2, 100), generator=generator)).logits
        prompt = torch.randint(3, 512, (1, 10), generator=generator)
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, min_new_tokens=6)
    return logits, tokens


def rounding_bound(model, ids: torch.Tensor, monkeypatch) -> float:
    """How far apart two correct fp32 evaluations of the model may be.

    transformers has two algorithms for the same op, by chunks and by tokens, whose results differ by rounding only. A
    third algorithm's error is of the same kind; 4 allows for its own order of summation.
    """
    module = sys.modules[type(model).__module__]
    with torch.inference_mode(), hook.torch_path():
        by_chunks = model(ids).logits
        with monkeypatch.context() as patch:
            for chunk, recurrent in [
                ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
                ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
            ]:
                if hasattr(module, chunk):
                    patch.setattr(module, chunk, getattr(module, recurrent))
            by_tokens = model(ids).logits
    return 4 * float((by_chunks - by_tokens).abs().max())


@pytest.mark.parametrize("family", CONFIGS)
def test_serves_every_call_with_the_same_result(family):
    model = tiny_model(family)
    with hook.torch_path() as plain:
        expected_logits, expected_tokens = standard_experiment(model)
    with hook.enabled() as report:
        logits, tokens = standard_experiment(model)

    chunk, step = CHUNK_AND_STEP[family]
    assert report.calls == {chunk: 6, step: 15}
    assert sum(plain.calls.values()) == 21
    assert not report.delegated
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
    assert torch.equal(tokens, expected_tokens)


@pytest.mark.parametrize("family", CONFIGS)
def test_differs_from_the_torch_path_by_rounding_only(family, monkeypatch):
    model = tiny_model(family)
    ids = torch.randint(3, 512, (1, 150), generator=torch.Generator().manual_seed(2))
    bound = rounding_bound(model, ids, monkeypatch)
    with torch.inference_mode():
        with hook.torch_path():
            expected = model(ids).logits
        with hook.enabled():
            logits = model(ids).logits
    assert float((logits - expected).abs().max()) <= bound


def test_gradients_reach_every_parameter_through_the_hook():
    model = tiny_model("Qwen3_5").train()
    ids = torch.randint(3, 512, (2, 80), generator=torch.Generator().manual_seed(3))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with hook.torch_path():
        expected = gradients()
    with hook.enabled() as report:
        actual = gradients()
    assert report.calls == {"chunk_gated_delta_rule": 3}
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_padded_rows_give_finite_results_equal_to_the_torch_path():
    model = tiny_model("KimiLinear")
    ids = torch.randint(3, 512, (2, 70), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.inference_mode():
        with hook.torch_path():
            expected = model(ids, attention_mask=mask).logits
        with hook.enabled():
            logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)


def test_packed_kda_sequences_are_kept_apart():
    # transformers leaves `cu_seq_lens_q` untranslated for KDA, so that its own path mixes the sequences.
    module = sys.modules[type(tiny_model("KimiLinear")).__module__]
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 90, 2, 16, generator=generator) for _ in range(3))
    g = -torch.rand(1, 90, 2, 16, generator=generator)
    beta = torch.rand(1, 90, 2, generator=generator)
    options = {"use_qk_l2norm_in_kernel": True, "max_length_q": 50}
    bounds = torch.tensor([0, 40, 90], dtype=torch.int32)
    with hook.enabled():
        packed, _ = module.chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, cu_seq_lens_q=bounds, **options)
        second = (x[:, 40:] for x in (q, k, v))
        alone, _ = module.chunk_kimi_delta_attention(*second, g=g[:, 40:], beta=beta[:, 40:], **options)
    torch.testing.assert_close(packed[:, 40:], alone, rtol=0, atol=1e-6)


class TestRestoring:
    def test_disable_puts_back_the_very_same_objects(self):
        module = sys.modules[type(tiny_model("Qwen3_5")).__module__]
        before = {name: vars(module).get(name) for name in hook.TARGETS}
        hook.enable()
        assert vars(module)["torch_chunk_gated_delta_rule"] is not before["torch_chunk_gated_delta_rule"]
        hook.disable()
        assert {name: vars(module).get(name) for name in hook.TARGETS} == before

    def test_enable_twice_is_enable_once(self):
        module = sys.modules[type(tiny_model("Qwen3_5")).__module__]
        original = module.torch_chunk_gated_delta_rule
        report = hook.enable()
        first = module.torch_chunk_gated_delta_rule
        patched = list(report.patched)
        assert hook.enable() is report
        assert module.torch_chunk_gated_delta_rule is first
        assert report.patched == patched
        assert len(set(patched)) == len(patched)
        hook.disable()
        assert module.torch_chunk_gated_delta_rule is original

    def test_an_inner_context_leaves_an_outer_hook_on(self):
        module = sys.modules[type(tiny_model("Qwen3_5")).__module__]
        original = module.torch_chunk_gated_delta_rule
        hook.enable()
        with hook.enabled():
            pass
        assert module.torch_chunk_gated_delta_rule is not original
        with hook.torch_path():
            assert module.torch_chunk_gated_delta_rule.__wrapped__ is not original
        assert module.torch_chunk_gated_delta_rule is not original

    def test_restores_after_an_exception(self):
        module = sys.modules[type(tiny_model("Qwen3_5")).__module__]
        original = module.torch_chunk_gated_delta_rule
        with pytest.raises(KeyError), hook.enabled():
            raise KeyError
        assert module.torch_chunk_gated_delta_rule is original

    def test_a_later_patch_of_somebody_else_survives(self, monkeypatch):
        module = sys.modules[type(tiny_model("Qwen3_5")).__module__]
        theirs = object()
        hook.enable()
        ours = module.torch_chunk_gated_delta_rule
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", theirs)
        hook.disable()
        assert module.torch_chunk_gated_delta_rule is theirs
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", ours.__wrapped__)


def test_other_devices_get_the_original_function():
    module = sys.modules[type(tiny_model("Qwen3_5")).__module__]
    q = torch.empty(1, 5, 2, 16, device="meta")
    g = torch.empty(1, 5, 2, device="meta")
    with hook.enabled() as report:
        out, _ = module.torch_chunk_gated_delta_rule(q, q, q, g=g, beta=g)
    assert out.device.type == "meta"
    assert report.delegated == {"torch_chunk_gated_delta_rule": 1}
    assert not report.calls


def test_missing_transformers_names_the_extra(monkeypatch):
    monkeypatch.setattr(hook.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"fla-npu\[transformers\]"):
        hook.enable()


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
        with hook.torch_path():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
        assert run.tokens == expected[0, 20:].tolist()
        assert run.forwards == 3 + len(run.tokens) - 1
        assert sum(run.calls.values()) == 3 * run.forwards

    def test_stops_at_the_end_token(self):
        model = tiny_model("Qwen3_5")
        ids = torch.randint(3, 512, (1, 20), generator=torch.Generator().manual_seed(7))
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


def originals() -> dict[str, object]:
    model = tiny_model("Qwen3_5")
    module = sys.modules[type(model).__module__]
    return {name: vars(module)[name] for name in hook.TARGETS if name in vars(module)}


def test_overlapping_hooks_leave_nothing_behind():
    before = originals()
    hook.enable()
    with hook.torch_path():
        hook.disable()
    assert originals() == before
    with hook.torch_path():
        hook.enable()
    hook.disable()
    assert originals() == before


def test_a_block_keeps_the_hook_on_while_others_end():
    before = originals()
    first, second = hook.enabled(), hook.enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert originals() != before
    second.__exit__(None, None, None)
    assert originals() == before
