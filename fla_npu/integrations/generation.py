"""Greedy generation with a transformers model: a long prefill in pieces, then one token at a time, both timed.

model = load(folder, torch.float32)
with enabled() as report:
    run = generate(model, ids, max_new_tokens=64, piece=4096)
"""

import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fla_npu.integrations.hook import enabled
from fla_npu.integrations.report import Report
from fla_npu.integrations.transformers import OP_NAMES, OPS, torch_path

LOGITS_BUDGET = 2**22
"""Most logits kept per piece of a prefill for a comparison, in elements: all positions of a byte model, the last few
of a model with a large vocabulary."""


@dataclass
class Generation:
    """One greedy run."""

    tokens: list[int]
    """The new tokens."""
    prefill_logits: torch.Tensor
    """`[positions, vocabulary]`: the last positions of every piece, in order; the last row gives the first token."""
    decode_logits: torch.Tensor
    """`[len(tokens) - 1, vocabulary]`: what each later token was chosen from."""
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    forwards: int
    """Calls of the model."""
    calls: Counter[str] = field(default_factory=Counter)
    """Linear-attention calls by function name, when the run was made by `run_served` or `run_torch_path`."""

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """None when only one token was generated: it comes out of the prefill."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None


@dataclass
class Comparison:
    """How far two runs on the same prompt are apart."""

    max_logit_difference: float
    """Over the kept prefill positions and the decode steps up to the first different token."""
    tokens_agree: bool
    agreeing_tokens: int
    """Length of the common prefix of the new tokens."""


def load(folder: Path, dtype: torch.dtype | str) -> Any:
    """The causal language model saved in `folder`, in eval mode; never looks beyond that folder.

    Raises:
        OSError, ValueError, KeyError: transformers cannot read the folder.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


@torch.inference_mode()
def generate(
    model: Any,
    ids: torch.Tensor,
    max_new_tokens: int,
    piece: int,
    keep_logits: bool = False,
    on_piece: Callable[[int], None] = lambda tokens: None,
) -> Generation:
    """Prefill `ids` in pieces through the model's cache, then decode greedily until `max_new_tokens` or the end token.

    Args:
        model: a transformers causal language model.
        ids: prompt, `[1, T]` with T >= 1, on the model's device.
        max_new_tokens: at least 1.
        piece: most tokens per forward of the prefill; the result does not depend on it beyond rounding.
        keep_logits: keep up to `LOGITS_BUDGET` logits of every piece instead of the last position of the last one.
        on_piece: called with the number of tokens of every finished piece.
    """
    # Named `past_key_values` before transformers 5.24.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ends = _end_tokens(model)
    kept = min(piece, max(1, LOGITS_BUDGET // model.config.get_text_config().vocab_size)) if keep_logits else 1

    started = time.perf_counter()
    cache: Any = None
    prefill_logits = []
    pieces = ids.split(piece, dim=1)
    for part in pieces:
        output = model(
            input_ids=part, use_cache=True, logits_to_keep=kept, **({} if cache is None else {cache_name: cache})
        )
        cache = output[cache_name]
        if keep_logits or part is pieces[-1]:
            prefill_logits.append(output.logits[0].float())
        on_piece(part.shape[1])
    tokens = [int(prefill_logits[-1][-1].argmax())]
    prefill_seconds = time.perf_counter() - started

    started = time.perf_counter()
    decode_logits = []
    while len(tokens) < max_new_tokens and tokens[-1] not in ends:
        step = ids.new_tensor([tokens[-1:]])
        output = model(input_ids=step, use_cache=True, **{cache_name: cache})
        decode_logits.append(output.logits[0, -1].float())
        tokens.append(int(decode_logits[-1].argmax()))
    decode_seconds = time.perf_counter() - started

    return Generation(
        tokens=tokens,
        prefill_logits=torch.cat(prefill_logits),
        decode_logits=torch.stack(decode_logits) if decode_logits else prefill_logits[-1][:0],
        prompt_tokens=ids.shape[1],
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        forwards=len(pieces) + len(decode_logits),
    )


def run_served(model: Any, ids: torch.Tensor, max_new_tokens: int, piece: int, **options: Any) -> Generation:
    """`generate` with this package serving the linear-attention ops.

    Raises:
        RuntimeError: some linear-attention call of the model did not reach this package.
    """
    run = _run(enabled, model, ids, max_new_tokens, piece, **options)
    served = sum(run.calls.values())
    expected = _linear_layers(model) * run.forwards
    if served == 0 or (expected and served != expected):
        raise RuntimeError(
            f"fla_npu served {served} linear-attention calls of {type(model).__name__}, and {expected} were expected"
        )
    return run


def run_torch_path(model: Any, ids: torch.Tensor, max_new_tokens: int, piece: int, **options: Any) -> Generation:
    """`generate` on transformers' own torch functions."""
    return _run(torch_path, model, ids, max_new_tokens, piece, **options)


def compare(run: Generation, other: Generation) -> Comparison:
    """Compare two runs that were made with the same prompt, piece and `keep_logits`."""
    agreeing = 0
    for token, other_token in zip(run.tokens, other.tokens, strict=False):
        if token != other_token:
            break
        agreeing += 1
    # Decode logits after a different token answer different questions.
    steps = min(agreeing, len(run.decode_logits), len(other.decode_logits))
    mine = torch.cat([run.prefill_logits, run.decode_logits[:steps]])
    theirs = torch.cat([other.prefill_logits, other.decode_logits[:steps]])
    return Comparison(
        max_logit_difference=float((mine - theirs).abs().max()),
        tokens_agree=run.tokens == other.tokens,
        agreeing_tokens=agreeing,
    )


@contextmanager
def prefill_progress(name: str, tokens: int, piece: int) -> Iterator[Callable[[int], None]]:
    """An `on_piece` that draws a bar on standard error; draws nothing when the prefill is a single piece."""
    from tqdm import tqdm

    with tqdm(total=tokens, desc=name, unit="token", file=sys.stderr, disable=tokens <= piece) as bar:

        def on_piece(done: int) -> None:
            bar.update(done)
            if bar.n >= tokens:
                # Decoding follows; an open bar would count it as prefill.
                bar.close()

        yield on_piece


def _run(
    hook: Callable[[], AbstractContextManager[Report]],
    model: Any,
    ids: torch.Tensor,
    max_new_tokens: int,
    piece: int,
    **options: Any,
) -> Generation:
    with hook() as report:
        before = report.calls.copy()
        run = generate(model, ids, max_new_tokens, piece, **options)
        made = report.calls - before
        run.calls = Counter({name: count for name, count in made.items() if name in OP_NAMES or name in OPS})
    return run


def _linear_layers(model: Any) -> int:
    """Number of linear-attention layers by the model's configuration; 0 where that does not list layer types."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    return list(layer_types).count("linear_attention")


def _end_tokens(model: Any) -> set[int]:
    end = model.generation_config.eos_token_id
    if end is None:
        return set()
    return {end} if isinstance(end, int) else set(end)
