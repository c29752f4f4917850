"""Whole layers of transformers: which are replaced, when they step back, and that nothing is left behind.

Their numbers are compared in tests/e2e, for every model.
"""

import contextlib
import copy
import gc
import inspect
import pickle
import sys
import types
import weakref

import pytest
import torch
import torch.nn as nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.monkey_patching import get_patch_mapping, register_patch_mapping, unregister_patch_mapping

import fla_npu
from fla_npu.integrations import layers
from fla_npu.integrations.transformers import torch_path
from tests.e2e.models import HERE, MODELS, build, modeling, text_config, words

pytestmark = pytest.mark.skipif(not layers._has_cache_states(), reason="whole layers need transformers 5.22")

NAME = "qwen3_5"


def mixer(model: nn.Module) -> nn.Module:
    """The first linear-attention layer."""
    return next(m for m in model.modules() if hasattr(m, "conv1d"))


def is_whole(layer: nn.Module) -> bool:
    return type(layer).__module__ == layers.__name__


def linear(model: nn.Module) -> int:
    """Number of linear-attention layers."""
    return sum(hasattr(m, "conv1d") for m in model.modules())


@pytest.fixture
def module() -> types.ModuleType:
    return modeling(NAME)


class TestWhichLayers:
    @pytest.mark.parametrize("name", HERE)
    def test_the_layers_and_norms_of_every_model(self, name):
        model = build(name)
        with fla_npu.enabled(layers=True) as report:
            whole = {type(m).__name__ for m in model.modules() if is_whole(m)}
        assert len(whole) == 2 and sum(n.endswith("RMSNormGated") for n in whole) == 1
        assert not any(modeling(name).__name__ in skipped for skipped in report.skipped)
        assert {f"Fused{p.rpartition('.')[2]}" for p in report.patched if modeling(name).__name__ in p} >= whole

    def test_models_built_while_it_is_on(self, module):
        with fla_npu.enabled(layers=True):
            model = AutoModelForCausalLM.from_config(text_config(NAME))
            assert is_whole(mixer(model)) and is_whole(mixer(model).norm)
            assert isinstance(mixer(model), module.Qwen3_5GatedDeltaNet)
            alone = module.Qwen3_5GatedDeltaNet(text_config(NAME), 0)
            assert not is_whole(alone)
            fla_npu.enable(layers=True)
            assert is_whole(alone)

    def test_parameters_are_initialised_as_by_transformers(self):
        config = text_config(NAME)
        torch.manual_seed(0)
        expected = AutoModelForCausalLM.from_config(config).state_dict()
        torch.manual_seed(0)
        with fla_npu.enabled(layers=True):
            actual = AutoModelForCausalLM.from_config(config).state_dict()
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)

    def test_only_when_asked(self):
        model = build(NAME)
        with fla_npu.enabled():
            assert not is_whole(mixer(model))
            with fla_npu.enabled(layers=True):
                assert is_whole(mixer(model))
        assert not is_whole(mixer(model))

    def test_a_forward_that_does_more_than_is_known_keeps_its_code(self, module, monkeypatch):
        class Qwen3_6GatedDeltaNet(module.Qwen3_5GatedDeltaNet):
            def forward(self, hidden_states, **kwargs):
                mixed = module.torch_chunk_gated_delta_rule(self.in_proj_qkv(hidden_states).tanh())
                return self.out_proj(mixed)

        # Names are looked up where the function was written.
        Qwen3_6GatedDeltaNet.__module__ = module.__name__
        monkeypatch.setattr(module, "Qwen3_6GatedDeltaNet", Qwen3_6GatedDeltaNet, raising=False)
        with fla_npu.enabled(layers=True) as report:
            assert "Qwen3_6GatedDeltaNet" not in get_patch_mapping()
        assert "its forward does what is not known here" in report.skipped[f"{module.__name__}.Qwen3_6GatedDeltaNet"]

    def test_a_number_that_is_not_known(self, module, monkeypatch):
        """Three times beta: the same names as OLMo-hybrid's."""
        olmo = modeling("olmo_hybrid").OlmoHybridGatedDeltaNet
        code = olmo.forward.__wrapped__.__wrapped__.__code__
        constants = tuple(3.0 if c == 2.0 and isinstance(c, float) else c for c in code.co_consts)

        class Tripled(olmo):
            forward = types.FunctionType(code.replace(co_consts=constants), vars(sys.modules[olmo.__module__]))

        assert layers._recipe(olmo) is not None
        assert layers._recipe(Tripled) is None


class TestSteppingBack:
    def test_a_compiled_model(self):
        model, ids = build(NAME), words(1, 1, 20)
        seen = []

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        with torch.inference_mode(), fla_npu.enabled(layers=True):
            expected = model(ids, use_cache=False).logits
            torch.compiler.reset()
            actual = torch.compile(model, backend=backend, fullgraph=True)(ids, use_cache=False).logits
        torch.compiler.reset()
        assert any("conv1d" in target for target in seen) and any("fla_npu" in target for target in seen)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)

    def test_the_torch_path(self):
        model, ids = build(NAME), words(2, 1, 70)
        with torch.inference_mode():
            with torch_path():
                expected = model(ids, use_cache=False).logits
            with fla_npu.enabled(layers=True) as report, torch_path() as plain:
                actual = model(ids, use_cache=False).logits
        assert torch.equal(actual, expected)
        assert sum(plain.calls.values()) == 3 and not report.calls

    def test_an_op_that_somebody_else_replaced(self, module, monkeypatch):
        layer, x = mixer(build(NAME)), torch.randn(1, 5, 64)
        with torch.inference_mode(), fla_npu.enabled(layers=True) as report:
            theirs = []
            served = module.torch_chunk_gated_delta_rule
            monkeypatch.setattr(
                module, "torch_chunk_gated_delta_rule", lambda *a, **k: theirs.append(1) or served(*a, **k)
            )
            layer(hidden_states=x)
            monkeypatch.undo()
        assert theirs and not report.calls["Qwen3_5GatedDeltaNet"]

    @pytest.mark.parametrize(
        "reason", ["meta", "offloaded", "other activation", "three-dimensional mask", "sequence numbers without bounds"]
    )
    def test_what_it_does_not_take(self, reason):
        layer, x, options = mixer(build(NAME)), torch.randn(1, 5, 64), {}
        if reason == "meta":
            layer, x = layer.to("meta"), x.to("meta")
        elif reason == "offloaded":
            layer.conv1d.weight = nn.Parameter(layer.conv1d.weight.to("meta"))
        elif reason == "other activation":
            layer.activation = "gelu"
        elif reason == "three-dimensional mask":
            options["attention_mask"] = torch.ones(1, 5, 1)
        else:
            options["seq_idx"] = torch.zeros(1, 5, dtype=torch.int32)
        # transformers' own code takes neither every mask nor weights that are elsewhere.
        fails = contextlib.suppress(RuntimeError, ValueError, NotImplementedError)
        with torch.inference_mode(), fla_npu.enabled(layers=True) as report, fails:
            layer(hidden_states=x, **options)
        assert report.delegated["Qwen3_5GatedDeltaNet"] == 1
        assert not report.calls["Qwen3_5GatedDeltaNet"]

    def test_positional_arguments(self):
        layer, x = mixer(build(NAME)), torch.randn(1, 5, 64)
        cache = DynamicCache(config=text_config(NAME))
        with torch.inference_mode(), fla_npu.enabled(layers=True):
            torch.testing.assert_close(layer(x, cache), layer(hidden_states=x), rtol=0, atol=1e-6)


class TestCache:
    def test_the_same_states_as_transformers(self):
        """Also after a prompt shorter than the convolution, and after `reset`."""
        model = build("kimi_linear")
        layer = mixer(model)

        def states() -> list[torch.Tensor]:
            cache, found = DynamicCache(config=model.config), []
            for lengths in ([2, 1, 1, 7, 1], [70, 3]):
                for n in lengths:
                    x = torch.randn(2, n, 64, generator=torch.Generator().manual_seed(n))
                    layer(hidden_states=x, cache=cache)
                    found += [cache.get_conv_state(0).clone(), cache.get_recurrent_state(0).clone()]
                cache.reset()
            return found

        with torch.inference_mode():
            with torch_path():
                expected = states()
            with fla_npu.enabled(layers=True):
                actual = states()
        assert [s.shape for s in actual] == [s.shape for s in expected]
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)

    def test_only_the_columns_that_are_kept_are_given_to_the_cache(self, monkeypatch):
        layer, cache = mixer(build(NAME)), DynamicCache(config=text_config(NAME))
        given = []
        update = cache.update_conv_state

        def record(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            given.append(x.shape[-1])
            return update(x, *args, **kwargs)

        monkeypatch.setattr(cache, "update_conv_state", record)
        with torch.inference_mode(), fla_npu.enabled(layers=True):
            for n in (200, 100, 2):
                layer(hidden_states=torch.randn(1, n, 64), cache=cache)
        assert given == [4, 4, 2]


class TestRestoring:
    def test_everything_is_as_it_was(self, module):
        model = build(NAME)
        before = {m: dict(vars(m)) for m in (module, modeling("kimi_linear"))}
        classes, mapping = [type(m) for m in model.modules()], get_patch_mapping()
        with fla_npu.enabled(layers=True):
            built = AutoModelForCausalLM.from_config(text_config(NAME))
            assert get_patch_mapping() != mapping
        assert [type(m) for m in model.modules()] == [type(m) for m in built.modules()] == classes
        assert get_patch_mapping() == mapping
        assert all(vars(m) == attributes for m, attributes in before.items())
        assert not layers._current

    @pytest.mark.parametrize("name", [NAME, "kimi_linear"])
    def test_a_model_goes_on_across_the_ends_of_a_block(self, name, tmp_path):
        """Entering and leaving change the class of the layers that exist, and no parameter and no state: a model loaded
        within a block is one of transformers after it, and a cache filled within is good outside, and the other way."""
        build(name).save_pretrained(tmp_path)
        ids = words(5, 1, 70)

        def load() -> nn.Module:
            return AutoModelForCausalLM.from_pretrained(tmp_path).eval()

        def generate(model: nn.Module) -> list[int]:
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "min_new_tokens": 5}
            return model.generate(ids, **options)[0, 70:].tolist()

        def step(model: nn.Module, cache: DynamicCache, first: int, last: int) -> torch.Tensor:
            name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
            with torch.inference_mode():
                return model(ids[:, first:last], use_cache=True, **{name: cache}).logits

        outside = load()
        expected, caches = generate(outside), [DynamicCache(config=outside.config) for _ in range(2)]
        with torch.inference_mode():
            whole = outside(ids).logits
        kept = [step(outside, caches[0], 0, 60)]
        with fla_npu.enabled(layers=True) as report:
            inside = load()
            assert is_whole(mixer(inside)) and is_whole(mixer(outside))
            assert generate(inside) == generate(outside) == expected
            calls = report.calls.copy()
            kept += [step(inside, caches[0], n, n + 1) for n in range(60, 65)]
            other = [step(outside, caches[1], 0, 60)]
            assert (report.calls - calls)[type(mixer(inside)).__name__.removeprefix("Fused")] == 6 * linear(inside)
        assert not is_whole(mixer(inside)) and not is_whole(mixer(outside))
        assert generate(inside) == generate(outside) == expected
        kept += [step(inside, caches[0], n, n + 1) for n in range(65, 70)]
        other += [step(inside, caches[1], n, n + 1) for n in range(60, 70)]
        for logits in (kept, other):
            torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=0, atol=1e-4)

    def test_a_constructor_that_raises(self, module):
        """transformers then leaves the replacements in its modules."""
        original = module.Qwen3_5GatedDeltaNet
        with fla_npu.enabled(layers=True):
            config = text_config(NAME)
            config.linear_num_value_heads = -1
            with pytest.raises((RuntimeError, ValueError)):
                AutoModelForCausalLM.from_config(config)
            assert module.Qwen3_5GatedDeltaNet is not original
        assert module.Qwen3_5GatedDeltaNet is original

    def test_a_replacement_of_somebody_else_stays(self, module):
        class Theirs(module.Qwen3_5GatedDeltaNet):
            pass

        register_patch_mapping({"Qwen3_5GatedDeltaNet": Theirs})
        try:
            with fla_npu.enabled(layers=True) as report:
                assert "another replacement" in report.skipped[f"{module.__name__}.Qwen3_5GatedDeltaNet"]
                model = AutoModelForCausalLM.from_config(text_config(NAME))
                assert type(mixer(model)) is Theirs
            assert get_patch_mapping()["Qwen3_5GatedDeltaNet"] is Theirs
        finally:
            unregister_patch_mapping(["Qwen3_5GatedDeltaNet"])

    def test_twice_is_once(self):
        report = fla_npu.enable(layers=True)
        build(NAME)
        patched = list(report.patched)
        assert fla_npu.enable(layers=True) is report and fla_npu.enable() is report
        assert report.patched == patched

    def test_copies_and_pickles(self):
        layer, x = mixer(build(NAME)), torch.randn(1, 70, 64)
        with torch.inference_mode(), fla_npu.enabled(layers=True):
            expected = layer(hidden_states=x)
            duplicate, written = copy.deepcopy(layer), pickle.dumps(layer)
            read = pickle.loads(written)
            assert is_whole(duplicate) and is_whole(read)
            assert torch.equal(duplicate(hidden_states=x), expected) and torch.equal(read(hidden_states=x), expected)
        read = pickle.loads(written)
        assert type(read) is type(layer) is type(duplicate) and not is_whole(read)

    def test_keeps_no_layer_alive(self):
        with fla_npu.enabled(layers=True):
            model = build(NAME)
            layer = weakref.ref(mixer(model))
            fla_npu.enable(layers=True)
            del model
            gc.collect()
            assert layer() is None


def test_layers_that_gc_freeze_has_put_aside():
    """What servers do once a model is loaded: `gc.get_objects()` does not list it any more."""
    model = build(NAME)
    held = {"deep": [(model,)]}
    del model
    gc.collect()
    gc.freeze()
    try:
        with fla_npu.enabled(layers=True):
            assert is_whole(mixer(held["deep"][0][0]))
        assert not is_whole(mixer(held["deep"][0][0]))
    finally:
        gc.unfreeze()


def test_hooks_on_submodules_are_called():
    """LoRA, quantisation and offloading work by them."""
    layer, called = mixer(build(NAME)), []
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "norm", "out_proj"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    with torch.inference_mode(), fla_npu.enabled(layers=True):
        layer(hidden_states=torch.randn(1, 5, 64))
    assert sorted(called) == ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "norm", "out_proj"]


@pytest.mark.parametrize("name", [n for n in HERE if MODELS[n].kda])
def test_autocast(name):
    layer, x = mixer(build(name)), torch.randn(1, 70, 64)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        with torch_path():
            expected = layer(hidden_states=x)
        with fla_npu.enabled(layers=True) as report:
            actual = layer(hidden_states=x)
    assert sum(report.calls.values()) and actual.dtype == expected.dtype
    # A bf16 product in the layer's output has 8 bits.
    assert float((actual - expected).norm() / expected.norm()) < 2**-6
