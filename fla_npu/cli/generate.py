"""`fla-npu generate`: a hybrid language model prefills a prompt and generates, its linear attention on this package."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fla_npu.assets import MODELS, model_folder
from fla_npu.assets.stdlib_text import held_out_text
from fla_npu.cli.errors import CommandError
from fla_npu.errors import ImplementationError, MissingExtraError

if TYPE_CHECKING:
    import torch

    from fla_npu.integrations.generation import Comparison, Generation

DEFAULT_PROMPT_BYTES = 4096
WARM_UP_TOKENS = 128
PROMPT_TAIL = 60
"""Tokens of the prompt that are shown with the continuation."""
BYTE_VOCABULARY = range(256, 1025)
"""Vocabulary sizes read as bytes (and possibly some special tokens) when a folder has no tokenizer."""


@click.command()
@click.option(
    "--model",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkpoint folder of a hybrid model (Qwen3.5, Qwen3-Next, Kimi-Linear, ...); default: an embedded model.",
)
@click.option("--op", type=click.Choice(list(MODELS)), help="Which embedded model.  [default: gdn]")
@click.option("--prompt", help="Text to continue; default: Python's own standard library.")
@click.option("--prompt-file", type=click.File("rb"), help="File with the text to continue; - reads standard input.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--compare", is_flag=True, help="Also run transformers' own torch code and report the differences.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option(
    "--chunk-prefill", type=click.IntRange(1), default=2048, show_default=True, help="Tokens per prefill step."
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: PyTorch's choice]")
def generate(
    folder: Path | None,
    op: str | None,
    prompt: str | None,
    prompt_file: Any,
    max_new_tokens: int,
    compare: bool,
    as_json: bool,
    chunk_prefill: int,
    threads: int | None,
) -> None:
    """Continue a text greedily with a hybrid language model whose linear-attention layers run on fla_npu.

    The text goes to standard output; speeds and, with --compare, differences go to standard error.
    """
    if folder and op:
        raise click.UsageError("--op chooses an embedded model; it has no meaning with --model")
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    prompt_bytes = _read_prompt(prompt, prompt_file)
    import torch

    if threads:
        torch.set_num_threads(threads)
    model, tokenizer = _load(folder, op or "gdn")
    encode, decode = _codec(model, tokenizer)
    ids = encode(prompt_bytes)
    if not ids.numel():
        raise CommandError("the tokenizer makes no tokens of this prompt", "give a prompt with more than white space")

    from fla_npu.integrations.generation import compare as compare_runs
    from fla_npu.integrations.generation import prefill_progress, run_served, run_torch_path

    def run(name: str, path: Callable[..., "Generation"]) -> "Generation":
        if compare:
            # The first calls pay for one-off work that has no place in a comparison of speeds.
            path(model, ids[:, :WARM_UP_TOKENS], 2, WARM_UP_TOKENS)
        with prefill_progress(name, ids.shape[1], chunk_prefill) as on_piece:
            return path(model, ids, max_new_tokens, chunk_prefill, keep_logits=compare, on_piece=on_piece)

    try:
        served = run("prefill (fla_npu)", run_served)
    except ImplementationError as error:
        raise CommandError(str(error), "unset FLA_NPU_IMPL, or set it to one of these names") from error
    except RuntimeError as error:
        raise CommandError(
            str(error),
            "use a model with Gated DeltaNet or Kimi Delta Attention layers: Qwen3.5, Qwen3-Next, Kimi-Linear",
        ) from error
    torch_run = run("prefill (transformers)", run_torch_path) if compare else None
    comparison = compare_runs(served, torch_run) if torch_run else None

    text = decode(served.tokens)
    if as_json:
        model_name = str(folder) if folder else MODELS[op or "gdn"]
        click.echo(json.dumps(_record(model_name, text, served, torch_run, comparison, torch.get_num_threads())))
        return
    click.echo(f"the prompt ends with {decode(ids[0, -PROMPT_TAIL:].tolist())!r}; it goes on with", err=True)
    click.echo(text)
    _remark(served, torch_run, comparison)


def _read_prompt(prompt: str | None, prompt_file: Any) -> bytes:
    if prompt is None and prompt_file is None:
        text = held_out_text(DEFAULT_PROMPT_BYTES)
        if not text:
            raise CommandError("this Python has no standard-library sources to use as prompt", "give a --prompt")
        return text
    text = prompt_file.read() if prompt is None else os.fsencode(prompt)
    if not text:
        raise CommandError("the prompt is empty", "give some text with --prompt or --prompt-file")
    return text


def _load(folder: Path | None, op: str) -> tuple[Any, Any]:
    """The model and, when its folder has one, its tokenizer."""
    try:
        import tqdm  # noqa: F401
        import transformers
    except ImportError as error:
        raise CommandError(
            str(MissingExtraError(error.name or "transformers", "transformers")),
            "`fla-npu doctor` shows what is installed",
        ) from error
    from fla_npu.integrations.generation import load

    # Its warnings that a function "is falling back to its reference implementation" are wrong under the hook.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = folder or model_folder(op)
    if not (path / "config.json").is_file():
        raise CommandError(
            f"{path} is not a model folder: it has no config.json",
            "give the folder of a checkpoint as transformers' save_pretrained writes it",
        )
    import torch

    try:
        # The embedded weights are stored in bf16 for size; a CPU computes faster in fp32.
        model = load(path, "auto" if folder else torch.float32)
        has_tokenizer = any(path.glob("tokenizer*")) or (path / "vocab.json").is_file()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True) if has_tokenizer else None
    except Exception as error:
        # transformers, safetensors and the tokenizers each have exceptions of their own for a bad folder.
        raise CommandError(
            f"cannot load the model in {path}: {_first_line(error)}",
            "the folder must hold config.json and complete weights (*.safetensors) of a causal language model",
        ) from error
    return model, tokenizer


def _codec(model: Any, tokenizer: Any) -> tuple[Callable[[bytes], "torch.Tensor"], Callable[[list[int]], str]]:
    """Functions from bytes to ids `[1, T]` and from new ids to text."""
    import torch

    if tokenizer is not None:
        return (
            lambda text: torch.tensor([tokenizer(text.decode(errors="replace"))["input_ids"]], dtype=torch.long),
            lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        )
    vocabulary = model.config.get_text_config().vocab_size
    if vocabulary not in BYTE_VOCABULARY:
        raise CommandError(
            f"the model folder has no tokenizer and its vocabulary of {vocabulary} is not byte-level",
            "put the tokenizer's files (tokenizer.json, tokenizer_config.json) into the folder",
        )
    return (
        lambda text: torch.tensor([list(text)], dtype=torch.long),
        lambda tokens: bytes(token if token < 256 else ord("?") for token in tokens).decode(errors="replace"),
    )


def _record(
    model: str,
    text: str,
    served: "Generation",
    torch_run: "Generation | None",
    comparison: "Comparison | None",
    threads: int,
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "model": model,
        "threads": threads,
        "prompt_tokens": served.prompt_tokens,
        "text": text,
        "tokens": served.tokens,
        "fla_npu": _speeds(served),
    }
    if torch_run and comparison:
        record["transformers"] = _speeds(torch_run)
        record["comparison"] = vars(comparison)
    return record


def _speeds(run: "Generation") -> dict[str, Any]:
    return {
        "calls": dict(run.calls),
        "prefill_seconds": run.prefill_seconds,
        "prefill_tokens_per_second": run.prefill_tokens_per_second,
        "decode_tokens_per_second": run.decode_tokens_per_second,
    }


def _remark(served: "Generation", torch_run: "Generation | None", comparison: "Comparison | None") -> None:
    calls = ", ".join(f"{count} {name}" for name, count in served.calls.items())
    click.echo(f"{served.prompt_tokens} prompt tokens, {len(served.tokens)} new; served by fla_npu: {calls}", err=True)
    for name, run in [("fla_npu", served), ("transformers", torch_run)]:
        if run:
            decode = run.decode_tokens_per_second
            decode_text = f", decode {decode:.1f} tokens/s" if decode else ""
            click.echo(f"{name}: prefill {run.prefill_tokens_per_second:.0f} tokens/s{decode_text}", err=True)
    if comparison:
        agree = "the same" if comparison.tokens_agree else f"different after {comparison.agreeing_tokens}"
        click.echo(f"largest logit difference {comparison.max_logit_difference:.2e}; greedy tokens {agree}", err=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
