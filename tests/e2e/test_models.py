"""All delta-rule models of transformers with their ops, and with their whole layers, on this package.

Every test compares with transformers' own functions, and counts who served.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

import fla_npu
from fla_npu.integrations.report import Report
from fla_npu.integrations.transformers import torch_path
from tests.e2e import models
from tests.e2e.models import HERE, MODELS, WITH_VISION, expectation, model_of, words

LINEAR_LAYERS = 3
ROUTES = {"ops": False, "layers": True}

FULL_GRAPH = [name for name in HERE if name not in ("qwen4_exp", "glm5_next")]
"""The indexed attention of the other two branches on values: they have no single graph in transformers either."""
MIXES_PACKED = ("glm5_next",)
"""transformers' indexed attention takes packed sequences for one."""

every_model = pytest.mark.parametrize("name", HERE)
every_route = pytest.mark.parametrize("route", ROUTES)


def served(route: str) -> AbstractContextManager[Report]:
    return fla_npu.enabled(layers=ROUTES[route])


def check_calls(name: str, route: str, report: Report, *, chunk: int, step: int = 0) -> None:
    """Forwards of the model with several tokens or no cache, and with one token and a cache."""
    ops = ("chunk_kda", "fused_recurrent_kda")
    if not MODELS[name].kda:
        ops = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    counted = tuple(report.calls[op] for op in ops)
    assert counted == (chunk * LINEAR_LAYERS, step * LINEAR_LAYERS), report.calls
    assert not report.delegated
    whole = sum(count for called, count in report.calls.items() if called.endswith(("DeltaNet", "Attention")))
    assert whole == (sum(counted) if route == "layers" else 0), report.calls


def continued(model: Any, ids: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """Logits of `ids`, given to the model in pieces."""
    cache = DynamicCache(config=model.config.get_text_config())
    logits = [model(part, cache=cache, use_cache=True).logits for part in ids.split(pieces, dim=1)]
    return torch.cat(logits, dim=1)


def generated(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, **options}
    return model.generate(ids, max_new_tokens=6, **options)


@functools.cache
def expected_logits(name: str, tokens: int) -> tuple[torch.Tensor, float]:
    """Of a batch of two, and their bound."""
    model, ids = model_of(name), words(tokens, 2, tokens)
    with torch.inference_mode():
        return expectation(name, lambda: model(ids, use_cache=False).logits)


def agree(name: str, route: str, run: Callable[[], torch.Tensor], **calls: int) -> None:
    """The served run equals transformers' own up to rounding."""
    with torch.inference_mode():
        expected, bound = expectation(name, run)
        with served(route) as report:
            actual = run()
    assert float((actual - expected).abs().max()) <= bound
    check_calls(name, route, report, **calls)


def test_every_model_found_has_a_tiny_configuration():
    missing = sorted(set(models.found()) - set(MODELS))
    assert not missing, (
        f"transformers {models.transformers.__version__} has delta-rule models that are not tested here: {missing}. "
        "Add a `Tiny` for each to MODELS in tests/e2e/models.py; layers of a new make need a recipe in "
        "fla_npu/integrations/layers.py too."
    )
    assert len(HERE) > 3


@every_model
@every_route
@pytest.mark.parametrize("tokens", [1, 65, 150])
def test_logits(name, route, tokens):
    expected, bound = expected_logits(name, tokens)
    model, ids = model_of(name), words(tokens, 2, tokens)
    with torch.inference_mode(), served(route) as report:
        actual = model(ids, use_cache=False).logits
    # One token: a single product, and no order of summation to tell two algorithms apart.
    assert float((actual - expected).abs().max()) <= max(bound, 8 * torch.finfo(torch.float32).eps)
    check_calls(name, route, report, chunk=1)


@every_model
@every_route
def test_logits_in_bf16(name, route):
    """Errors to the same weights in fp32: this package rounds no oftener than transformers does. Both errors are sums
    of many roundings, equal in distribution if not in value: a quarter more would be no accident."""
    model, ids = model_of(name, torch.bfloat16), words(2, 2, 150)
    with torch.inference_mode(), torch_path():
        wide = models.build(name)
        wide.load_state_dict(model.state_dict())
        exact = wide(ids, use_cache=False).logits
        theirs = model(ids, use_cache=False).logits.float()
    with torch.inference_mode(), served(route) as report:
        ours = model(ids, use_cache=False).logits
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).square().mean().sqrt() <= 1.25 * (theirs - exact).square().mean().sqrt()
    check_calls(name, route, report, chunk=1)


@every_model
@every_route
def test_greedy_tokens(name, route):
    model, ids = model_of(name), words(3, 1, 10)
    with torch_path() as plain:
        expected = generated(model, ids)
    with served(route) as report:
        assert torch.equal(generated(model, ids), expected)
    check_calls(name, route, report, chunk=1, step=5)
    assert sum(plain.calls.values()) == 6 * LINEAR_LAYERS


@every_model
@every_route
def test_prefill_in_pieces_and_cached_decoding(name, route):
    """Pieces shorter than the convolution, one token, longer than a chunk; then token by token."""
    model, ids = model_of(name), words(4, 2, 90)
    pieces = [2, 1, 5, 70, *[1] * 12]
    agree(name, route, lambda: continued(model, ids, pieces), chunk=3, step=13)
    with torch.inference_mode(), served(route):
        # Which attention falls into which block differs too, so the bound is that of a whole run, doubled.
        whole = model(ids, use_cache=False).logits
        difference = float((continued(model, ids, pieces) - whole).abs().max())
    assert difference <= 2 * max(expected_logits(name, 150)[1], 1e-6)


@every_model
@every_route
def test_a_batch_with_left_padding(name, route):
    model, ids = model_of(name), words(5, 3, 40)
    mask = torch.ones_like(ids)
    mask[0, :9] = mask[1, :38] = 0
    agree(name, route, lambda: model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], chunk=1)
    with torch_path():
        expected = generated(model, ids, attention_mask=mask)
    with served(route):
        assert torch.equal(generated(model, ids, attention_mask=mask), expected)


@every_model
@every_route
def test_packed_sequences_are_computed_as_if_alone(name, route):
    lengths = [40, 1, 3, 66]
    model, rows = model_of(name), [words(n, 1, n) for n in lengths]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = {
        "input_ids": torch.cat(rows, dim=1),
        "position_ids": torch.cat([torch.arange(n)[None] for n in lengths], dim=1),
        "seq_idx": torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], dim=1).int(),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }

    def hidden(inputs: dict[str, Any]) -> torch.Tensor:
        output = model(**inputs, use_cache=False, output_hidden_states=True)
        return output.hidden_states[LINEAR_LAYERS] if name in MIXES_PACKED else output.logits

    with torch.inference_mode(), torch_path():
        alone = torch.cat([hidden({"input_ids": row}) for row in rows], dim=1)
    with torch.inference_mode(), served(route) as report:
        together = hidden(packed)
    # Full attention sums over other blocks when it is packed, in transformers too.
    assert float((together - alone).abs().max()) <= 2 * max(expected_logits(name, 150)[1], 1e-6)
    check_calls(name, route, report, chunk=1)


@every_model
@every_route
def test_beam_search_reorders_the_states(name, route):
    model, ids = model_of(name), words(6, 2, 12)
    with torch_path():
        expected = generated(model, ids, num_beams=3, num_return_sequences=2)
    with served(route) as report:
        assert torch.equal(generated(model, ids, num_beams=3, num_return_sequences=2), expected)
    check_calls(name, route, report, chunk=1, step=5)


@every_model
@every_route
def test_static_cache(name, route):
    model, ids = model_of(name), words(7, 2, 12)
    with torch_path():
        expected = generated(model, ids, cache_implementation="static")
    with served(route) as report:
        assert torch.equal(generated(model, ids, cache_implementation="static"), expected)
    check_calls(name, route, report, chunk=1, step=5)


@every_model
@every_route
def test_a_training_step(name, route):
    """All gradients, those of the gates' parameters included, against both algorithms of transformers."""
    model, ids = models.build(name).train(), words(8, 2, 80)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    with torch_path():
        expected = gradients()
    with models.by_tokens(name):
        other = gradients()
    with served(route) as report:
        actual = gradients()
    check_calls(name, route, report, chunk=1)
    assert actual.keys() == expected.keys() and any("A_log" in n for n in actual)
    scale = max(float(g.norm()) for g in expected.values())
    for n, gradient in expected.items():
        # As for logits; where the gradient all but cancels, to the precision of what cancels.
        bound = 4 * float((other[n] - gradient).norm()) + 1e-6 * scale
        assert float((actual[n] - gradient).norm()) <= bound, n


@every_model
@every_route
def test_gradient_checkpointing(name, route):
    model, ids = models.build(name).train(), words(9, 1, 40)
    with served(route) as report:
        model(input_ids=ids, labels=ids).loss.backward()
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids).loss.backward()
    check_calls(name, route, report, chunk=3)
    for n, gradient in expected.items():
        # The same sums; where a buffer starts in memory may decide which of them a vector unit takes together.
        torch.testing.assert_close(model.get_parameter(n).grad, gradient, rtol=1e-3, atol=1e-6)


@every_model
@every_route
def test_saving_and_loading(name, route, tmp_path):
    """A checkpoint is transformers' own either way: written by one, read by the other."""
    ids, model = words(10, 1, 30), models.build(name)
    with torch.inference_mode(), served(route):
        logits = model(ids, use_cache=False).logits
        model.save_pretrained(tmp_path)
    auto = AutoModelForCausalLM if MODELS[name].text_alone else AutoModelForImageTextToText
    loaded = auto.from_pretrained(tmp_path, local_files_only=True).eval()
    assert loaded.state_dict().keys() == model.state_dict().keys() == model_of(name).state_dict().keys()
    with torch.inference_mode(), served(route) as report:
        again = auto.from_pretrained(tmp_path, local_files_only=True).eval()
        torch.testing.assert_close(again(ids, use_cache=False).logits, logits, rtol=0, atol=0)
        torch.testing.assert_close(loaded(ids, use_cache=False).logits, logits, rtol=0, atol=0)
    check_calls(name, route, report, chunk=2)


@pytest.mark.slow
@every_route
@pytest.mark.parametrize("name", FULL_GRAPH)
def test_compiled(name, route):
    """One graph; whole layers leave it to transformers' code around the ops, which a compiler fuses itself."""
    model, ids = model_of(name), words(11, 1, 70)
    torch.compiler.reset()
    with torch.inference_mode():
        expected, bound = expectation(name, lambda: model(ids, use_cache=False).logits)
        with served(route):
            logits = torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False).logits
    assert float((logits - expected).abs().max()) <= bound
    torch.compiler.reset()


@every_route
@pytest.mark.parametrize("name", WITH_VISION)
def test_text_and_an_image(name, route):
    model = models.build(name, vision=True)
    tower = model.config.vision_config
    patches = (tower.spatial_merge_size * 2) ** 2
    grid = torch.tensor([[1, tower.spatial_merge_size * 2, tower.spatial_merge_size * 2]])
    pixels = torch.randn(
        patches, 3 * tower.temporal_patch_size * tower.patch_size**2, generator=torch.Generator().manual_seed(12)
    )
    image = [models.VISION_START, *[models.IMAGE_TOKEN] * 4, models.VISION_END]
    ids = torch.cat([words(13, 1, 20), torch.tensor([image]), words(14, 1, 50)], dim=1)
    inputs = {
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == models.IMAGE_TOKEN).int(),
    }
    agree(name, route, lambda: model(ids, **inputs, use_cache=False).logits, chunk=1)
    with torch_path():
        expected = generated(model, ids, **inputs)
    with served(route) as report:
        assert torch.equal(generated(model, ids, **inputs), expected)
    check_calls(name, route, report, chunk=1, step=5)
    with torch.inference_mode(), served(route):
        # The image matters, so it is computed.
        other = model(ids, **{**inputs, "pixel_values": -pixels}, use_cache=False).logits
        assert not torch.allclose(other[:, -1], model(ids, **inputs, use_cache=False).logits[:, -1], atol=1e-4)


@every_model
@every_route
def test_a_cache_that_records_the_past(name, route):
    """As models that draft their own tokens have it; whole layers leave such calls to transformers."""
    model, ids = model_of(name), words(15, 1, 40)

    def run() -> torch.Tensor:
        cache = DynamicCache(config=model.config.get_text_config())
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        return torch.cat([model(x, cache=cache, use_cache=True).logits for x in ids.split([30, 1, 9], dim=1)], dim=1)

    with torch.inference_mode():
        expected, bound = expectation(name, run)
        with served(route) as report:
            actual = run()
    assert float((actual - expected).abs().max()) <= bound
    whole = sum(count for called, count in report.delegated.items() if called.endswith(("DeltaNet", "Attention")))
    assert whole == (3 * LINEAR_LAYERS if route == "layers" else 0)
