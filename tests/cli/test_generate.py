"""`fla-npu generate` in process: what goes to stdout, how it ends, and what it says when it cannot."""

import json
import sys

import pytest
import torch
from click.testing import CliRunner

import fla_npu
from fla_npu.assets import MODELS, model_folder
from fla_npu.cli.main import main
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A byte-level Qwen3.5 folder without a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("Qwen3_5", eos_token_id=None, bos_token_id=None, pad_token_id=None).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(*arguments: str, **options):
    return CliRunner().invoke(main, ["generate", *map(str, arguments)], **options)


def test_json_is_one_object_with_calls_speeds_and_comparison(checkpoint):
    result = run(
        "--model", checkpoint, "--prompt", "def f(x):\n" * 20, "--max-new-tokens", 5, "--chunk-prefill", 64,
        "--compare", "--json", "--threads", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["prompt_tokens"] == 200
    assert record["threads"] == 1
    assert len(record["tokens"]) == 5
    # Three layers; 200 bytes in pieces of 64 are 4 forwards, and 4 more tokens follow the first.
    assert record["fla_npu"]["calls"] == {"chunk_gated_delta_rule": 12, "fused_recurrent_gated_delta_rule": 12}
    assert sum(record["transformers"]["calls"].values()) == 24
    assert record["comparison"]["tokens_agree"]
    assert record["comparison"]["agreeing_tokens"] == 5
    assert record["comparison"]["max_logit_difference"] < 1e-5
    for path in ("fla_npu", "transformers"):
        assert record[path]["prefill_tokens_per_second"] > 0
        assert record[path]["decode_tokens_per_second"] > 0


def test_where_whole_layers_are_enabled_already(checkpoint):
    """The command then counts in the report of the block that is open."""
    arguments = ("--model", checkpoint, "--prompt", "x" * 70, "--max-new-tokens", 3, "--compare", "--json")
    expected = json.loads(run(*arguments).stdout)
    with fla_npu.enabled(layers=True) as report:
        record = json.loads(run(*arguments).stdout)
        ops = report.calls["chunk_gated_delta_rule"] + report.calls["fused_recurrent_gated_delta_rule"]
        assert report.calls["Qwen3_5GatedDeltaNet"] == ops > 0
    assert record["tokens"] == expected["tokens"] and record["comparison"]["tokens_agree"]
    assert record["fla_npu"]["calls"] == expected["fla_npu"]["calls"]
    assert record["transformers"]["calls"] == expected["transformers"]["calls"]
    assert json.loads(run(*arguments).stdout)["tokens"] == expected["tokens"]


def test_text_goes_to_stdout_and_remarks_to_stderr(checkpoint):
    arguments = ("--model", checkpoint, "--prompt", "import os", "--max-new-tokens", 3)
    text = json.loads(run(*arguments, "--json").stdout)["text"]
    result = run(*arguments)
    assert result.exit_code == 0
    assert result.stdout == text + "\n"
    assert "served by fla_npu: 3 chunk_gated_delta_rule, 6 fused_recurrent_gated_delta_rule" in result.stderr


def test_prompt_file_and_standard_input(checkpoint, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"while True:")
    arguments = ("--model", checkpoint, "--max-new-tokens", 2, "--json")
    from_file = json.loads(run(*arguments, "--prompt-file", path).stdout)
    from_stdin = json.loads(run(*arguments, "--prompt-file", "-", input=b"while True:").stdout)
    from_option = json.loads(run(*arguments, "--prompt", "while True:").stdout)
    assert from_file["tokens"] == from_stdin["tokens"] == from_option["tokens"]


def test_progress_shows_only_on_prefills_of_several_pieces(checkpoint):
    arguments = ("--model", checkpoint, "--prompt", "x" * 50, "--max-new-tokens", 1)
    assert "prefill (fla_npu)" in run(*arguments, "--chunk-prefill", 10).stderr
    assert "prefill (fla_npu)" not in run(*arguments).stderr


@pytest.mark.parametrize("op", MODELS)
def test_embedded_models_run_and_agree_with_transformers(op):
    if not (model_folder(op) / "config.json").exists():
        pytest.skip("the embedded model is not in this checkout")
    result = run(
        "--op", op, "--prompt", "import os\nimport sys\n\ndef main(", "--max-new-tokens", 8, "--compare", "--json"
    )
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["comparison"]["tokens_agree"]
    assert record["comparison"]["max_logit_difference"] < 1e-3
    assert record["model"] == MODELS[op]


@pytest.mark.parametrize(
    ("arguments", "code", "message", "hint"),
    [
        (["--prompt-file", "does/not/exist"], 2, "No such file", "--help"),
        (["--model", "does/not/exist"], 2, "does not exist", "--help"),
        (["--prompt", "a", "--prompt-file", "-"], 2, "not both", "--help"),
        (["--max-new-tokens", "0"], 2, "max-new-tokens", "--help"),
        (["--chunk-prefill", "0"], 2, "chunk-prefill", "--help"),
        (["--prompt", ""], 1, "the prompt is empty", "Hint: give some text"),
    ],
    ids=["missing-prompt-file", "missing-folder", "two-prompts", "no-new-tokens", "no-piece", "empty-prompt"],
)
def test_bad_arguments_end_with_a_message_and_a_hint(checkpoint, arguments, code, message, hint):
    if "--model" not in arguments:
        arguments = ["--model", checkpoint, *arguments]
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert hint in result.stderr
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)


def test_op_with_model_is_refused(checkpoint):
    result = run("--model", checkpoint, "--op", "kda", "--prompt", "a")
    assert result.exit_code == 2
    assert "--op" in result.stderr


def check_failure(result, message: str, hint: str) -> None:
    assert result.exit_code == 1
    assert message in result.stderr
    assert f"Hint: {hint}" in result.stderr
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)


def test_a_folder_without_a_model(tmp_path):
    check_failure(run("--model", tmp_path, "--prompt", "a"), "has no config.json", "give the folder of a checkpoint")


def test_a_folder_with_a_broken_model(tmp_path, checkpoint):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    check_failure(run("--model", tmp_path, "--prompt", "a"), "cannot load the model", "the folder must hold")


def test_a_large_vocabulary_without_a_tokenizer(tmp_path):
    tiny_model("Qwen3_5", vocab_size=2000).save_pretrained(tmp_path)
    check_failure(run("--model", tmp_path, "--prompt", "a"), "has no tokenizer", "put the tokenizer's files")


def test_a_model_without_linear_attention(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    check_failure(run("--model", tmp_path, "--prompt", "a"), "served 0 linear-attention calls", "use a model with")


def test_without_transformers_the_extra_is_named(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    check_failure(
        run("--model", checkpoint, "--prompt", "a"), "pip install 'fla-npu[transformers]'", "`fla-npu doctor`"
    )


def test_without_any_text_a_prompt_is_asked_for(checkpoint, monkeypatch):
    monkeypatch.setattr("fla_npu.cli.generate.held_out_text", lambda num_bytes: b"")
    check_failure(run("--model", checkpoint), "no standard-library sources", "give a --prompt")


def test_tokenizer_of_the_folder_is_used(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<unk>", "alpha", "beta", "gamma"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    tiny_model("Qwen3_5", vocab_size=4, eos_token_id=None, bos_token_id=None).save_pretrained(tmp_path)
    result = run("--model", tmp_path, "--prompt", "alpha beta gamma alpha", "--max-new-tokens", 2, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["prompt_tokens"] == 4
    check_failure(run("--model", tmp_path, "--prompt", " "), "no tokens of this prompt", "give a prompt with more")
