"""FLA 0.6 itself on this package: its ops, layers and models on a CPU, and transformers' models beside it."""

import importlib
import inspect
import operator
import os
import subprocess
import sys
import types

import pytest
import torch

import fla_npu
import fla_npu.layers
from fla_npu.integrations import fla_backend, imports, transformers
from fla_npu.integrations.transformers import torch_path
from tests.tiny_models import tiny_model

if not imports.installed_elsewhere("fla"):
    pytest.skip("FLA is not installed: make test-fla installs it", allow_module_level=True)
try:
    import fla
    from fla import backends
except ImportError as error:
    pytest.skip(f"FLA cannot be imported: {error}", allow_module_level=True)

HEADS = {"head_dim": 16, "num_heads": 2}
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="FLA finds a GPU's driver")


def state() -> dict[str, object]:
    """Everything that enabling touches in FLA."""
    modules = {
        f"{name}.{key}": id(value)
        for name, module in sys.modules.items()
        if name == "fla" or name.startswith("fla.")
        for key, value in vars(module).items()
        if key != "__builtins__" and (inspect.isroutine(value) or inspect.isclass(value))
    }
    modules["loss"] = id(fla.modules.FusedCrossEntropyLoss.forward)
    registries = [*backends._operation_registries.values(), *backends._function_registries.values()]
    return modules | {
        f"{number} {registry.operation_name}": (dict(registry._backends), set(registry._logged))
        for number, registry in enumerate(registries)
    }


def logged() -> str:
    return " ".join(backends._function_registries[inspect.unwrap(fla.ops.kda.chunk_kda)]._logged)


@without_gpu
@pytest.mark.parametrize("family", ["Qwen3_5", "KimiLinear"])
def test_models_of_transformers_run_where_fla_finds_no_driver(family):
    """The defect of transformers 5.15 to 5.24: they call FLA whatever the device is."""
    model = tiny_model(family)
    ids = torch.randint(3, 512, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="0 active drivers"):
            model(ids)
        with torch_path():
            expected = model(ids).logits
        with fla_npu.enabled() as report:
            logits = model(ids).logits
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, min_new_tokens=3)
        assert report.calls["chunk_kda" if family == "KimiLinear" else "chunk_gated_delta_rule"] == 6
        with pytest.raises(RuntimeError, match="0 active drivers"):
            model(ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


LAYERS = {
    "gated_deltanet.GatedDeltaNet": (HEADS, "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule_fwd"),
    "kda.KimiDeltaAttention": (HEADS, "chunk_kda", "fused_recurrent_kda_fwd"),
    "gdn2.GatedDeltaNet2": (HEADS, "chunk_gdn2", "fused_recurrent_gdn2"),
    "gated_deltaproduct.GatedDeltaProduct": (
        HEADS,
        "chunk_gated_delta_product",
        "fused_recurrent_gated_delta_rule_fwd",
    ),
    "delta_net.DeltaNet": ({"num_heads": 2, "use_gate": True}, "chunk_delta_rule", "fused_recurrent_delta_rule"),
    "gla.GatedLinearAttention": (
        {"num_heads": 2, "use_short_conv": True, "feature_map": "swish"},
        "chunk_gla",
        "fused_recurrent_gla",
    ),
    "simple_gla.SimpleGatedLinearAttention": (
        {"num_heads": 2, "use_short_conv": True},
        "chunk_simple_gla",
        "fused_recurrent_simple_gla",
    ),
    "multiscale_retention.MultiScaleRetention": (
        {"num_heads": 2, "use_short_conv": True},
        "chunk_retention",
        "fused_recurrent_retention",
    ),
}
"""Layer -> its arguments, and FLA's functions for more and for fewer than 64 tokens."""


@pytest.mark.parametrize("path", LAYERS)
def test_layers_of_fla_compute_what_those_of_fla_npu_do(path):
    options, chunk, recurrent = LAYERS[path]
    module, name = path.split(".")
    torch.manual_seed(0)
    theirs, ours = (
        getattr(importlib.import_module(f"{package}.layers.{module}"), name)(hidden_size=64, layer_idx=0, **options)
        for package in ("fla", "fla_npu")
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 80, 64)
    packed = {"cu_seqlens": torch.tensor([0, 30, 80])}
    mask = torch.ones(2, 80)
    mask[0, :9] = 0
    with fla_npu.enabled() as report:
        results = [layer(x)[0] for layer in (theirs, ours)]
        for result in results:
            result.square().mean().backward()
        gradients = [[p.grad for p in layer.parameters()] for layer in (theirs, ours)]
        with torch.no_grad():
            results += [layer.eval()(x[:, :10])[0] for layer in (theirs, ours)]
            results += [layer(x[:1], **packed)[0] for layer in (theirs, ours)]
            results += [layer(x, attention_mask=mask)[0] for layer in (theirs, ours)]
    # The same functions are called with the same arguments.
    for mine, their in zip(results[1::2], results[::2], strict=True):
        torch.testing.assert_close(mine, their, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    # Chunks for training and for more than 64 tokens, steps for 10 tokens; the layers of fla_npu are not counted.
    assert report.calls[chunk] == 3 and report.calls[recurrent] == 1
    assert report.calls["causal_conv1d"] and report.calls["rms_norm_gated"]


@pytest.mark.parametrize(
    "path",
    [
        "simple_gla.fused_chunk_simple_gla",
        "simple_gla.parallel_simple_gla",
        "retention.fused_chunk_retention",
        "retention.parallel_retention",
    ],
)
def test_ops_that_layers_do_not_call_by_default(path):
    module, name = path.split(".")
    q, k, v = torch.randn(3, 1, 70, 2, 16, generator=torch.Generator().manual_seed(0)).unbind()
    options = {"g": -torch.rand(1, 70, 2)} if module == "simple_gla" else {}
    with fla_npu.enabled() as report:
        o, _ = getattr(importlib.import_module(f"fla.ops.{module}"), name)(q, k, v, **options)
    assert report.calls == {name: 1}
    ours = getattr(importlib.import_module(f"fla_npu.ops.{module}"), name)
    assert torch.equal(o, ours(q, k, v, **options)[0])


MODELS = {
    "GatedDeltaNet": HEADS,
    "KDA": HEADS,
    "GatedDeltaProduct": HEADS,
    "DeltaNet": {"num_heads": 2},
    "GLA": {"num_heads": 2},
    "RetNet": {"num_heads": 2},
    "Mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16},
}


def model_of_fla(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(fla.models, f"{name}Config")(num_hidden_layers=2, hidden_size=64, vocab_size=256, **MODELS[name])
    return getattr(fla.models, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_fla_prefill_decode_and_keep_packed_sequences_apart(name):
    model = model_of_fla(name).eval()
    ids = torch.randint(3, 256, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), fla_npu.enabled():
        whole = model(ids).logits
        # Step by step: FLA 0.6.0 does not know `cache`, the name under which `generate` of transformers 5.24 passes it.
        output = model(ids[:, :84], use_cache=True)
        steps = [output.logits]
        for token in ids[:, 84:].split(1, dim=1):
            output = model(token, use_cache=True, past_key_values=output.past_key_values)
            steps.append(output.logits)
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-5)
        if name == "Mamba2":
            return  # FLA's own code, which takes no packed sequences
        packed = model(ids, cu_seqlens=torch.tensor([0, 30, 90])).logits
        alone = torch.cat([model(part).logits for part in ids.split([30, 60], dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_fla_train(name):
    model = model_of_fla(name)
    ids = torch.randint(3, 256, (2, 70), generator=torch.Generator().manual_seed(2))
    with fla_npu.enabled():
        loss = model(ids, labels=ids).loss
        loss.backward()
        logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "arguments", "inputs"),
    [
        ("RMSNorm", (64,), "input"),
        ("LayerNorm", (64,), "input"),
        ("GroupNorm", (4, 64), "input"),
        ("FusedRMSNormGated", (64,), "gated"),
        ("FusedLayerNormGated", (64,), "gated"),
        ("FusedRMSNormSwishGate", (64,), "gated"),
        ("RMSNormLinear", (64,), "linear"),
        ("LayerNormLinear", (64,), "linear"),
        ("GroupNormLinear", (4, 64), "linear"),
        ("FusedRMSNormSwishGateLinear", (64,), "gated linear"),
        ("FusedLayerNormSwishGateLinear", (64,), "gated linear"),
        ("GatedMLP", (64,), "input"),
        ("ShortConvolution", (64, 4), "input"),
        ("RotaryEmbedding", (64,), "heads"),
        ("FusedKLDivLoss", (), "distillation"),
        ("FusedLinearCrossEntropyLoss", (), "loss"),
    ],
)
def test_modules_of_fla_compute_what_those_of_fla_npu_do(name, arguments, inputs):
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 2, 10, 64, generator=generator).unbind()
    weight, heads = torch.randn(32, 64, generator=generator), torch.randn(2, 2, 10, 3, 64, generator=generator).unbind()
    values = {
        "input": (x,),
        "gated": (x, gate),
        "linear": (x, weight, None),
        "gated linear": (x, gate, weight, None),
        "heads": heads,
        "distillation": (x[0], gate[0], weight, -weight),
        "loss": (x[0], torch.arange(10), weight),
    }[inputs]

    def results(package: str) -> list[torch.Tensor]:
        module = getattr(importlib.import_module(f"{package}.modules"), name)
        leaves = [None if v is None else v.clone() for v in values]
        for leaf in leaves[:: 2 if name == "FusedKLDivLoss" else 1]:  # whose teacher gets no gradients
            if leaf is not None and leaf.is_floating_point():
                leaf.requires_grad_()
        torch.manual_seed(0)
        y = module(*arguments)(*leaves)
        outputs = [part for part in (y if isinstance(y, tuple) else (y,)) if part is not None]
        sum(part.square().sum() for part in outputs).backward()
        return outputs + [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]

    with fla_npu.enabled() as report:
        theirs = results("fla")
    assert report.calls
    torch.testing.assert_close(theirs, results("fla_npu"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "definition"),
    [
        ("sigmoid", torch.sigmoid),
        ("logsigmoid", torch.nn.functional.logsigmoid),
        ("swish", torch.nn.functional.silu),
    ],
)
def test_activations_that_layers_keep(activation, definition):
    from fla.modules.activations import ACT2FN

    kept = ACT2FN[activation]
    x = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    with fla_npu.enabled() as report:
        y = kept(x)
        y.backward(torch.ones_like(y) * 3)
    expected = x.detach().requires_grad_()
    definition(expected).sum().mul(3).backward()
    torch.testing.assert_close(y, definition(x))
    torch.testing.assert_close(x.grad, expected.grad)
    assert report.calls == {f"{activation}_fwd": 1, f"{activation}_bwd": 1}


def test_what_takes_the_place_of_a_function_has_its_arguments():
    for module, functions in fla_backend.TARGETS.items():
        for name, target in functions.items():
            theirs = operator.attrgetter(name)(importlib.import_module(module))
            path = target.function or f"{module.replace('fla', 'fla_npu', 1).removesuffix('.ops')}:{name}"
            ours = inspect.signature(transformers.load(path)).parameters
            expected = inspect.signature(inspect.unwrap(theirs)).parameters
            if any(p.kind is p.VAR_KEYWORD for p in ours.values()) or inspect.ismethod(theirs):
                continue  # adapters, and `Function.apply`, which names none
            named = [p for p in expected.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert [p.name for p in named] == list(ours)[: len(named)], (module, name)


def test_functions_that_other_modules_have_imported_are_served_and_put_back():
    user = types.ModuleType("user_of_fla")
    original = user.chunk = fla.ops.delta_rule.chunk_delta_rule
    sys.modules[user.__name__] = user
    q, beta = torch.nn.functional.normalize(torch.randn(1, 5, 2, 16), dim=-1), torch.rand(1, 5, 2)
    try:
        with fla_npu.enabled() as report:
            assert user.chunk is not original
            o, _ = user.chunk(q, q, q, beta)
        assert report.calls == {"chunk_delta_rule": 1} and o.shape == q.shape
        assert user.chunk is original
    finally:
        del sys.modules[user.__name__]


def test_a_loss_over_several_devices_stays_with_fla():
    loss = fla.modules.FusedCrossEntropyLoss(process_group=object())
    logits, target = torch.randn(3, 8), torch.zeros(3, dtype=torch.long)
    with fla_npu.enabled() as report, pytest.raises(AssertionError, match="CUDA"):
        loss(logits, target)
    assert report.delegated == {"FusedCrossEntropyLoss.forward": 1} and not report.calls


def test_everything_is_put_back():
    before = state()
    with fla_npu.enabled() as report:
        assert {
            "fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule",
            "fla.ops.gated_delta_rule.fused_recurrent.fused_recurrent_gated_delta_rule_fwd",
            "fla.ops.kda.chunk.chunk_kda",
            "fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd",
        } <= set(report.patched)
        assert not [name for name in report.skipped if name.startswith("fla")]
        assert state() != before
        model_of_fla("KDA")(torch.ones(1, 5, dtype=torch.long))
        assert fla_backend.BACKEND in logged()
    assert state() == before
    assert fla_backend.BACKEND not in logged()


@pytest.mark.parametrize("missing", ["_operation_registries", "_function_registries", "BaseBackend"])
def test_an_fla_that_registers_in_another_way_is_told_of_and_left_alone(missing, monkeypatch):
    before = state()
    with monkeypatch.context() as patch:
        patch.delattr(backends, missing)
        with fla_npu.enabled() as report:
            assert any(missing in reason for reason in report.skipped.values())
            assert "fla.modules.norm.l2norm.l2norm" in report.patched
    assert state() == before


def test_comes_before_every_backend_of_fla():
    with fla_npu.enabled():
        for registry in (
            backends._operation_registries["gated_delta_rule"],
            backends._operation_registries["kda"],
            backends._function_registries[inspect.unwrap(fla.ops.kda.chunk_kda)],
        ):
            names = [backend.backend_type for backend in registry._get_sorted_backends()]
            assert len(names) > 1 and names[0] == fla_backend.BACKEND


@without_gpu
def test_other_devices_and_context_parallelism_are_left_to_fla():
    x, g = torch.empty(1, 5, 2, 16, device="meta"), torch.empty(1, 5, 2, device="meta")
    with fla_npu.enabled() as report:
        for call in (
            lambda: fla.ops.gated_delta_rule.chunk_gated_delta_rule(x, x, x, g=g, beta=g),
            lambda: fla.ops.kda.chunk_kda(x, x, x, g=x, beta=g),
            lambda: fla.ops.kda.chunk_kda(*(torch.zeros(1, 5, 2, 16),) * 3, x, g, cp_context=object()),
        ):
            with pytest.raises((RuntimeError, AttributeError, AssertionError)):
                call()
        assert not report.calls
        q, gate = torch.zeros(1, 5, 2, 16), torch.zeros(1, 5, 2)
        with pytest.raises(TypeError, match="missing"):
            fla.modules.norm.l2norm.l2norm()
        # Whatever the order of keywords.
        fla.ops.gated_delta_rule.chunk_gated_delta_rule(cu_seqlens=None, g=gate, beta=gate, k=q, v=q, q=q)
    assert report.calls == {"chunk_gated_delta_rule": 1}


def test_an_fla_imported_later_is_served_and_put_back():
    code = """
import sys, torch, fla_npu
with fla_npu.enabled() as report:
    from fla.ops.kda import chunk_kda
    x = torch.randn(1, 5, 2, 16)
    chunk_kda(x, x, x, g=-x.abs(), beta=x[..., 0].sigmoid())
    assert report.calls["chunk_kda"] == 1, report
    import fla.modules.causal_conv1d.ops as conv, fla.backends as backends
    import causal_conv1d, fla.layers.mamba
    assert conv.causal_conv1d_fn_cuda is fla.layers.mamba.causal_conv1d_fn is None  # FLA does not take the stand-in
left = [
    f"{name}.{key}"
    for name, module in sys.modules.items() if name.startswith("fla.")
    for key, value in vars(module).items() if (getattr(value, "__module__", None) or "").startswith("fla_npu")
    or getattr(getattr(value, "__code__", None), "co_filename", "").endswith("fla_backend.py")
]
assert not left, left
assert not any("fla_npu" in registry._backends for registry in backends._operation_registries.values())
print(fla_npu.enable().routes["fla"])
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "fla_npu is a backend of its ops" in result.stdout


def test_the_report_tells_when_fla_does_not_dispatch():
    code = (
        "import fla_npu; report = fla_npu.enable()\n"
        "import fla.ops.kda\n"
        "print(report.skipped['fla.ops.kda.chunk.chunk_kda'])"
    )
    variables = os.environ | {"FLA_DISABLE_BACKEND_DISPATCH": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=variables, check=True
    )
    assert result.stdout.strip() == "FLA_DISABLE_BACKEND_DISPATCH is set"


def test_the_mamba2_layer_of_fla_computes_what_that_of_fla_npu_does():
    """On a CPU it runs its own code, between an activation and a norm that are served."""
    options = {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16}
    torch.manual_seed(0)
    theirs, ours = (
        importlib.import_module(f"{package}.layers.mamba2").Mamba2(layer_idx=0, **options)
        for package in ("fla", "fla_npu")
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 40, 64)
    with fla_npu.enabled() as report:
        results = [layer(x)[0] for layer in (theirs, ours)]
        for result in results:
            result.square().mean().backward()
    # Two algorithms: a few roundings of sums of 16 x 32 products of about 1.
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
    for (name, mine), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, their.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert report.calls == {"swish_fwd": 1, "swish_bwd": 1, "rmsnorm_fn": 1}
