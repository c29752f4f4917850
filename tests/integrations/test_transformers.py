"""transformers' layers on this package: who serves the calls, that the numbers stay, that nothing is left behind."""

import gc
import pickle
import sys
import types

import pytest
import torch
import torch.nn as nn

import fla_npu
from fla_npu.errors import MissingExtraError
from fla_npu.integrations import transformers as hook
from fla_npu.integrations.imports import installed_elsewhere
from fla_npu.integrations.transformers import OPS, torch_path
from tests.tiny_models import CONFIGS, tiny_model

CHUNK_AND_STEP = {
    "Qwen3_5": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "Qwen3Next": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "OlmoHybrid": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "KimiLinear": ("chunk_kda", "fused_recurrent_kda"),
}


def modeling_module(family: str) -> types.ModuleType:
    return sys.modules[type(tiny_model(family)).__module__]


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
    with torch.inference_mode(), torch_path():
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
    with torch_path() as plain:
        expected_logits, expected_tokens = standard_experiment(model)
    with fla_npu.enabled() as report:
        logits, tokens = standard_experiment(model)

    chunk, step = CHUNK_AND_STEP[family]
    assert report.calls == {chunk: 6, step: 15, "causal_conv1d_fn": 6, "causal_conv1d_update": 15}
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
        with torch_path():
            expected = model(ids).logits
        with fla_npu.enabled():
            logits = model(ids).logits
    assert float((logits - expected).abs().max()) <= bound


def test_gradients_reach_every_parameter_through_the_hook():
    model = tiny_model("Qwen3_5").train()
    ids = torch.randint(3, 512, (2, 80), generator=torch.Generator().manual_seed(3))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    with torch_path():
        expected = gradients()
    with fla_npu.enabled() as report:
        actual = gradients()
    assert report.calls == {"chunk_gated_delta_rule": 3, "causal_conv1d_fn": 3}
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_padded_rows_give_finite_results_equal_to_the_torch_path():
    model = tiny_model("KimiLinear")
    ids = torch.randint(3, 512, (2, 70), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.inference_mode():
        with torch_path():
            expected = model(ids, attention_mask=mask).logits
        with fla_npu.enabled():
            logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)


def test_a_compiled_model_is_served_without_a_break_in_its_graph():
    model = tiny_model("Qwen3_5")
    ids = torch.randint(3, 512, (1, 20), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode(), fla_npu.enabled():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        logits = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


class TestPackedSequences:
    """transformers' own code mixes packed sequences in KDA layers and, without `seq_idx`, in every convolution."""

    LENGTHS = 40, 3, 50

    @pytest.mark.parametrize("family", CONFIGS)
    @pytest.mark.parametrize("with_seq_idx", [False, True])
    def test_every_sequence_is_computed_as_if_it_were_alone(self, family, with_seq_idx):
        model = tiny_model(family)
        rows = [torch.randint(3, 512, (1, n), generator=torch.Generator().manual_seed(n)) for n in self.LENGTHS]
        bounds = torch.tensor([0, *torch.tensor(self.LENGTHS).cumsum(0)], dtype=torch.int32)
        packed = {
            "input_ids": torch.cat(rows, dim=1),
            "position_ids": torch.cat([torch.arange(n)[None] for n in self.LENGTHS], dim=1),
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": max(self.LENGTHS),
            "max_length_k": max(self.LENGTHS),
        }
        if with_seq_idx:
            packed["seq_idx"] = torch.cat([torch.full((1, n), i) for i, n in enumerate(self.LENGTHS)], dim=1).int()
        with torch.inference_mode(), fla_npu.enabled() as report:
            logits = model(**packed, use_cache=False).logits
            alone = torch.cat([model(row, use_cache=False).logits for row in rows], dim=1)
        assert not report.delegated
        # The same sums in the same order, except that chunks and blocks start elsewhere.
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)

    def test_the_kda_op_takes_the_bounds_by_the_name_that_transformers_uses(self):
        module = modeling_module("KimiLinear")
        generator = torch.Generator().manual_seed(5)
        q, k, v = (torch.randn(1, 90, 2, 16, generator=generator) for _ in range(3))
        g = -torch.rand(1, 90, 2, 16, generator=generator)
        beta = torch.rand(1, 90, 2, generator=generator)
        options = {"use_qk_l2norm_in_kernel": True, "max_length_q": 50}
        bounds = torch.tensor([0, 40, 90], dtype=torch.int32)
        with fla_npu.enabled():
            packed, _ = module.chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, cu_seq_lens_q=bounds, **options)
            second = (x[:, 40:] for x in (q, k, v))
            alone, _ = module.chunk_kimi_delta_attention(*second, g=g[:, 40:], beta=beta[:, 40:], **options)
        torch.testing.assert_close(packed[:, 40:], alone, rtol=0, atol=1e-6)


class TestRestoring:
    def test_disable_puts_back_the_very_same_objects(self):
        module = modeling_module("Qwen3_5")
        before = dict(vars(module))
        fla_npu.enable()
        assert vars(module)["torch_chunk_gated_delta_rule"] is not before["torch_chunk_gated_delta_rule"]
        fla_npu.disable()
        assert vars(module) == before

    def test_enable_twice_is_enable_once(self):
        module = modeling_module("Qwen3_5")
        original = module.torch_chunk_gated_delta_rule
        report = fla_npu.enable()
        first = module.torch_chunk_gated_delta_rule
        patched = list(report.patched)
        assert fla_npu.enable() is report
        assert module.torch_chunk_gated_delta_rule is first
        assert report.patched == patched
        assert len(set(patched)) == len(patched)
        fla_npu.disable()
        assert module.torch_chunk_gated_delta_rule is original

    def test_an_inner_context_leaves_an_outer_hook_on(self):
        module = modeling_module("Qwen3_5")
        original = module.torch_chunk_gated_delta_rule
        fla_npu.enable()
        with fla_npu.enabled():
            pass
        assert module.torch_chunk_gated_delta_rule is not original
        with torch_path():
            assert module.torch_chunk_gated_delta_rule.__wrapped__ is not original
        assert module.torch_chunk_gated_delta_rule is not original

    def test_restores_after_an_exception(self):
        module = modeling_module("Qwen3_5")
        original = module.torch_chunk_gated_delta_rule
        with pytest.raises(KeyError), fla_npu.enabled():
            raise KeyError
        assert module.torch_chunk_gated_delta_rule is original

    def test_a_later_patch_of_somebody_else_survives(self, monkeypatch):
        module = modeling_module("Qwen3_5")
        theirs = object()
        fla_npu.enable()
        ours = module.torch_chunk_gated_delta_rule
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", theirs)
        fla_npu.disable()
        assert module.torch_chunk_gated_delta_rule is theirs
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", ours.__wrapped__)

    def test_overlapping_hooks_leave_nothing_behind(self):
        module = modeling_module("Qwen3_5")
        before = dict(vars(module))
        fla_npu.enable()
        with torch_path():
            fla_npu.disable()
        assert vars(module) == before
        with torch_path():
            fla_npu.enable()
        fla_npu.disable()
        assert vars(module) == before

    def test_a_block_keeps_the_hook_on_while_others_end(self):
        module = modeling_module("Qwen3_5")
        before = dict(vars(module))
        first, second = fla_npu.enabled(), fla_npu.enabled()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert vars(module) != before
        second.__exit__(None, None, None)
        assert vars(module) == before


@pytest.mark.skipif(installed_elsewhere("fla"), reason="the original function is then one of FLA, for GPUs")
def test_other_devices_get_the_original_functions():
    module = modeling_module("Qwen3_5")
    q = torch.empty(1, 5, 2, 16, device="meta")
    g = torch.empty(1, 5, 2, device="meta")
    x = torch.empty(1, 8, 5, device="meta")
    with fla_npu.enabled() as report:
        out, _ = module.torch_chunk_gated_delta_rule(q, q, q, g=g, beta=g)
        y = module.causal_conv1d_fn(x, torch.empty(8, 4, device="meta"), activation="silu")
    assert out.device.type == y.device.type == "meta"
    assert report.delegated == {"torch_chunk_gated_delta_rule": 1, "causal_conv1d_fn": 1}
    assert not report.calls


def test_a_convolution_with_another_activation_stays_with_transformers():
    module = modeling_module("Qwen3_5")
    x, weight = torch.randn(1, 8, 5), torch.randn(8, 4)
    expected = module.causal_conv1d_fn(x, weight, activation="gelu")
    with fla_npu.enabled() as report:
        assert torch.equal(module.causal_conv1d_fn(x, weight, activation="gelu"), expected)
    assert report.delegated == {"causal_conv1d_fn": 1}


def test_models_without_linear_attention_keep_their_convolutions():
    from transformers.models.lfm2 import modeling_lfm2

    before = dict(vars(modeling_lfm2))
    with fla_npu.enabled():
        assert vars(modeling_lfm2) == before


def test_the_torch_path_needs_transformers(monkeypatch):
    monkeypatch.setattr(hook.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"fla-npu\[transformers\]"), torch_path():
        pass


class TestUpTo514:
    """Layers that keep the functions they found when they were built, as in transformers 4.57 to 5.14."""

    @pytest.fixture
    def module(self):
        name = "transformers.models.olden.modeling_olden"
        module = types.ModuleType(name)

        def torch_chunk_gated_delta_rule(query, key, value, g, beta, **kwargs):
            return "torch chunk", None

        def torch_recurrent_gated_delta_rule(query, key, value, g, beta, **kwargs):
            return "torch recurrent", None

        def torch_causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
            return "torch update"

        class OldenGatedDeltaNet(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.causal_conv1d_fn = module.causal_conv1d_fn
                self.causal_conv1d_update = module.causal_conv1d_update or module.torch_causal_conv1d_update
                self.chunk_gated_delta_rule = module.chunk_gated_delta_rule or module.torch_chunk_gated_delta_rule
                self.recurrent_gated_delta_rule = (
                    module.fused_recurrent_gated_delta_rule or module.torch_recurrent_gated_delta_rule
                )

            def forward(self) -> list[str]:
                """Which functions run."""
                x = torch.randn(1, 5, 2, 8)
                g = -torch.rand(1, 5, 2)
                mixed, weight = torch.randn(1, 6, 5), torch.randn(6, 4)
                o, _ = self.chunk_gated_delta_rule(x, x, x, g=g, beta=-g, cu_seqlens=None)
                step, _ = self.recurrent_gated_delta_rule(x, x, x, g=g, beta=-g)
                update = self.causal_conv1d_update(mixed[..., :1], torch.zeros(1, 6, 4), weight, None, "silu")
                inline = self.causal_conv1d_fn is None
                if not inline:
                    self.causal_conv1d_fn(x=mixed, weight=weight, bias=None, activation="silu", seq_idx=None)
                served = [not isinstance(result, str) for result in (o, step, update)]
                return [*served, not inline]

        OldenGatedDeltaNet.__module__ = name
        for function in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule, torch_causal_conv1d_update):
            setattr(module, function.__name__, function)
        module.OldenGatedDeltaNet = OldenGatedDeltaNet
        module.chunk_gated_delta_rule = module.fused_recurrent_gated_delta_rule = None
        module.causal_conv1d_fn = module.causal_conv1d_update = module.FusedRMSNormGated = None
        module.is_fast_path_available = False
        sys.modules[name] = module
        yield module
        fla_npu.disable()
        del sys.modules[name]

    def test_layers_built_before_and_after_are_served_and_restored(self, module):
        before = dict(vars(module))
        early = module.OldenGatedDeltaNet()
        early_kept = dict(vars(early))
        assert early() == [False] * 4
        report = fla_npu.enable()
        late = module.OldenGatedDeltaNet()
        assert early() == late() == [True] * 4
        assert report.calls["chunk_gated_delta_rule"] == report.calls["causal_conv1d_fn"] == 2
        assert module.is_fast_path_available
        assert module.FusedRMSNormGated is None
        with torch_path() as plain:
            assert early() == late() == module.OldenGatedDeltaNet()() == [False] * 4
        assert plain.calls == {"torch_chunk_gated_delta_rule": 3, "torch_recurrent_gated_delta_rule": 3}
        assert early() == late() == [True] * 4
        fla_npu.disable()
        assert vars(module) == before
        assert vars(early) == early_kept
        assert early() == late() == [False] * 4

    def test_functions_of_an_fla_that_wants_a_gpu_are_served_too(self, module):
        def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs):
            return "fla chunk", None

        module.chunk_gated_delta_rule = chunk_gated_delta_rule
        early = module.OldenGatedDeltaNet()
        with fla_npu.enabled():
            assert early()[0] and module.OldenGatedDeltaNet()()[0]
        assert module.chunk_gated_delta_rule is early.chunk_gated_delta_rule is chunk_gated_delta_rule

    def test_layers_are_pickled_by_the_names_of_what_they_keep(self, module):
        module.OldenGatedDeltaNet.__qualname__ = "OldenGatedDeltaNet"
        for name in OPS:
            if name in vars(module) and vars(module)[name] is not None:
                vars(module)[name].__module__, vars(module)[name].__qualname__ = module.__name__, name
        module.torch_causal_conv1d_update.__module__ = module.__name__
        module.torch_causal_conv1d_update.__qualname__ = "torch_causal_conv1d_update"
        with fla_npu.enabled():
            pickled = pickle.dumps(module.OldenGatedDeltaNet())
            assert pickle.loads(pickled)() == [True] * 4
        assert pickle.loads(pickled)() == [False] * 4

    def test_layers_that_gc_freeze_has_put_aside(self, module):
        layer = module.OldenGatedDeltaNet()
        gc.freeze()
        try:
            with fla_npu.enabled():
                assert layer() == [True] * 4
            assert layer() == [False] * 4
        finally:
            gc.unfreeze()

    def test_leaves_no_layer_alive(self, module):
        layer = module.OldenGatedDeltaNet()
        with fla_npu.enabled():
            pass
        kept = sum(type(x) is module.OldenGatedDeltaNet for x in gc.get_objects())
        del layer
        gc.collect()
        assert sum(type(x) is module.OldenGatedDeltaNet for x in gc.get_objects()) == kept - 1


def test_every_target_exists():
    for target in OPS.values():
        module, name = target.split(":")
        assert hasattr(sys.modules[module], name)
