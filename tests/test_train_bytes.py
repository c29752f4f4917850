"""The training script at toy size: it learns, its weights go to transformers and back, and it resumes exactly."""

import json
import signal
from dataclasses import replace

import pytest
import torch
import transformers
from click.testing import CliRunner

from examples import train_bytes
from examples.train_bytes import FAMILIES, LayerSlot, Settings, batch_at, build_model, to_transformers, train
from fla_npu.assets.stdlib_text import documents, held_out_text, is_held_out
from fla_npu.integrations import convert
from fla_npu.integrations.transformers import torch_path

TOY = Settings(
    steps=24, batch=4, seq_len=48, hidden_size=32, warmup=4, learning_rate=1e-2, validate_every=8, validation_windows=8
)
TEXT = b"".join(b"def f%d(x):\n    return x + %d\n\n" % (i % 7, i % 5) for i in range(400))


@pytest.fixture(autouse=True)
def small_text_and_same_threads(monkeypatch):
    monkeypatch.setattr(train_bytes, "load_text", lambda held_out: torch.frombuffer(bytearray(TEXT), dtype=torch.uint8))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """The model with every trained parameter moved off its initial value, so that no two mix-ups cancel."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("op", FAMILIES)
def test_exported_model_gives_the_same_logits_in_plain_transformers(op):
    model = randomised(build_model(replace(TOY, op=op)))
    plain = to_transformers(model, op)
    ids = batch_at(train_bytes.load_text(False), TOY, 0)
    with torch.inference_mode(), torch_path() as report:
        torch.testing.assert_close(plain(ids).logits, model(input_ids=ids, use_cache=False).logits, rtol=0, atol=2e-5)
    assert sum(report.calls.values()) == 3, "the exported model must run on transformers' own functions"


@pytest.mark.parametrize(
    ("op", "to_theirs", "to_ours"),
    [
        ("gdn", convert.gated_deltanet_to_qwen3_5, convert.qwen3_5_to_gated_deltanet),
        ("kda", convert.kimi_delta_attention_to_kimi_linear, convert.kimi_linear_to_kimi_delta_attention),
    ],
)
class TestConversion:
    def layer(self, op):
        family = FAMILIES[op]
        torch.manual_seed(5)
        return randomised(family.make_layer(family.make_config(64)))

    def test_there_and_back_is_the_identity(self, op, to_theirs, to_ours):
        state = self.layer(op).state_dict()
        back = to_ours(to_theirs(state))
        assert back.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(back[name], tensor), name

    def test_a_transformers_layer_computes_the_same_here(self, op, to_theirs, to_ours):
        family = FAMILIES[op]
        config = family.make_config(64)
        plain = randomised(transformers.AutoModelForCausalLM.from_config(config))
        theirs = getattr(plain.model.layers[1], family.attribute)
        ours = family.make_layer(config).eval()
        ours.load_state_dict(to_ours(theirs.state_dict()))
        x = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(6))
        with torch.inference_mode(), torch_path():
            torch.testing.assert_close(ours(x)[0], theirs(x), rtol=0, atol=2e-5)

    def test_missing_and_unknown_tensors_are_named(self, op, to_theirs, to_ours):
        state = dict(self.layer(op).state_dict())
        state["surplus"] = state["A_log"]
        with pytest.raises(ValueError, match="no counterpart for surplus"):
            to_theirs(state)
        del state["surplus"], state["A_log"]
        with pytest.raises(ValueError, match="missing A_log"):
            to_theirs(state)
        with pytest.raises(ValueError, match="missing"):
            to_ours({})


def test_an_output_gate_bias_has_no_place_in_kimi_linear():
    layer = FAMILIES["kda"].make_layer(FAMILIES["kda"].make_config(64))
    state = dict(layer.state_dict())
    state["g_proj.1.bias"] = torch.ones_like(state["g_proj.1.bias"])
    with pytest.raises(ValueError, match=r"g_proj\.1\.bias is not zero"):
        convert.kimi_delta_attention_to_kimi_linear(state)


@pytest.mark.parametrize("op", FAMILIES)
def test_loss_falls_and_the_folder_loads_in_plain_transformers(op, tmp_path):
    settings = replace(TOY, op=op)
    assert train(settings, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "training.json", "loss.png",
    }  # fmt: skip
    record = json.loads((tmp_path / "training.json").read_text())
    losses = [loss for _, loss in record["losses"]["training"]]
    assert len(losses) == settings.steps
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert record["validation_loss_bf16_weights"] == pytest.approx(record["validation_loss"], abs=0.02)
    assert "PSF-2.0" in record["text"]["source"]

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert type(model).__name__ == {"gdn": "Qwen3_5ForCausalLM", "kda": "KimiLinearForCausalLM"}[op]
    assert not any(isinstance(module, LayerSlot) for module in model.modules())


def test_an_interrupted_run_resumes_to_the_same_result(tmp_path, monkeypatch):
    settings = replace(TOY, steps=10, validate_every=100)
    handler = signal.getsignal(signal.SIGINT)  # of whoever started the tests; ignored under nohup
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    assert train(settings, whole)

    def interrupt_at_step_6(text, settings, step):
        if step == 6:
            signal.raise_signal(signal.SIGINT)
        return batch_at(text, settings, step)

    with monkeypatch.context() as patch:
        patch.setattr(train_bytes, "batch_at", interrupt_at_step_6)
        assert not train(settings, interrupted)
    assert torch.load(interrupted / "checkpoint.pt", weights_only=True)["step"] == 7
    assert signal.getsignal(signal.SIGINT) is handler
    assert train(settings, interrupted, resume=True)

    logs = [json.loads((folder / "training.json").read_text())["losses"] for folder in (whole, interrupted)]
    assert logs[0] == logs[1]
    assert (whole / "model.safetensors").read_bytes() == (interrupted / "model.safetensors").read_bytes()


def test_command_line_refuses_a_resume_that_cannot_be(tmp_path, monkeypatch):
    result = CliRunner().invoke(train_bytes.main, ["--out", str(tmp_path), "--resume"])
    assert result.exit_code == 1
    assert "nothing to resume" in result.output

    monkeypatch.setattr(
        train_bytes, "batch_at", lambda *_: signal.raise_signal(signal.SIGINT) or torch.zeros(1, 9).long()
    )
    arguments = ["--out", str(tmp_path), "--seq-len", "8", "--steps", "2"]
    assert CliRunner().invoke(train_bytes.main, arguments).exit_code == 130
    result = CliRunner().invoke(train_bytes.main, [*arguments, "--resume", "--seed", "1"])
    assert result.exit_code == 1
    assert "other settings" in result.output


def test_learning_rate_warms_up_and_falls_to_its_final_value():
    settings = Settings(steps=100, warmup=10, learning_rate=1.0, final_learning_rate=0.1)
    rates = [settings.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_batches_depend_on_seed_and_step_only():
    text = train_bytes.load_text(False)
    assert torch.equal(batch_at(text, TOY, 3), batch_at(text, TOY, 3))
    assert not torch.equal(batch_at(text, TOY, 3), batch_at(text, TOY, 4))
    assert not torch.equal(batch_at(text, TOY, 3), batch_at(text, replace(TOY, seed=1), 3))
    assert batch_at(text, TOY, 3).shape == (TOY.batch, TOY.seq_len + 1)


class TestText:
    def test_sides_of_the_split_are_disjoint_and_the_same_every_time(self):
        training, held_out = ([name for name, _ in documents(side)] for side in (False, True))
        assert not set(training) & set(held_out)
        assert len(training) > 10 * len(held_out) > 0
        assert is_held_out("operator.py") and not is_held_out("heapq.py")

    def test_no_third_party_tests_or_machine_facts(self):
        for side in (False, True):
            for name, _ in documents(side):
                assert not {"site-packages", "test", "tests"} & set(name.split("/")), name
                assert "sysconfigdata" not in name

    def test_a_prompt_is_cut_to_length(self):
        assert len(held_out_text(20000)) == 20000
        assert held_out_text(100) == held_out_text(20000)[:100]
