"""The main job on the two embedded models: prefill 16 KiB of text, generate, and compare with transformers' own code.

    python -m examples.demo --out out/demo

For each model (Gated DeltaNet and Kimi Delta Attention, each 3 : 1 with full attention) this prints a continuation
and how the run on fla_npu compares with the same run on transformers' torch functions: the largest logit difference,
whether the greedy tokens agree, and the speeds. Then it measures the prefill time against the length on both paths and
writes `prefill.png` and `demo.json`. The full-attention layer, the projections and the MLPs are the same code in both.

The logit difference is rounding, most of it that of transformers' chunk functions: the trained models decay by up to
exp(-178) per token, and differences of such cumulative decays lose digits in fp32. Against float64, the outputs of
this package's ops on these models have a normalised mean squared error of 1e-14 to 3e-14; transformers' have 5e-13 to
1e-10.
"""

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
import transformers

import fla_npu
from fla_npu.assets import MODELS, model_folder
from fla_npu.assets.stdlib_text import held_out_text
from fla_npu.integrations.generation import Generation, compare, load, prefill_progress, run_served, run_torch_path

PROMPT_BYTES = 16384
NEW_TOKENS = 200
PIECE = 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
PATHS = {"fla_npu": run_served, "transformers": run_torch_path}
REPEATS = 2
SWEEP_SECONDS = 30.0
"""Most time that one path of one model gets in the sweep, so that the demo ends in minutes on a slow machine too."""


def prompt_text(num_bytes: int) -> bytes:
    """At least `num_bytes` bytes of whole lines: held-out standard library, else this package's source."""
    text = held_out_text(2 * num_bytes)
    for path in sorted(Path(fla_npu.__file__).parent.rglob("*.py")):
        if len(text) >= 2 * num_bytes:
            break
        text += path.read_bytes()
    end = text.find(b"\n", num_bytes)
    return text[: end + 1] if end >= 0 else text


def as_ids(text: bytes) -> torch.Tensor:
    """Token ids `[1, T]` of a byte-level model."""
    return torch.tensor([list(text)], dtype=torch.long)


def as_text(tokens: list[int]) -> str:
    """Text of new tokens of a byte-level model."""
    return bytes(tokens).decode(errors="replace")


def generate_and_compare(op: str, model: Any) -> dict[str, Any]:
    """Run the main job on both paths, print it, and return the figures."""
    ids = as_ids(prompt_text(PROMPT_BYTES))
    runs: dict[str, Generation] = {}
    for name, path in PATHS.items():
        path(model, ids[:, :256], 2, 256)
        with prefill_progress(f"{op} prefill on {name}", ids.shape[1], PIECE) as on_piece:
            runs[name] = path(model, ids, NEW_TOKENS, PIECE, keep_logits=True, on_piece=on_piece)
    served, plain = runs["fla_npu"], runs["transformers"]
    comparison = compare(served, plain)

    print(f"\n== {MODELS[op]}: {served.prompt_tokens} bytes of text, continued by {len(served.tokens)} bytes ==")
    print(as_text(ids[0, -400:].tolist()) + "\033[1m" * sys.stdout.isatty() + as_text(served.tokens), end="")
    print("\033[0m" * sys.stdout.isatty())
    print(f"-- served by fla_npu: {dict(served.calls)}")
    for name, run in runs.items():
        print(
            f"-- {name:<13} prefill {run.prefill_tokens_per_second:8.0f} tokens/s ({run.prefill_seconds:.2f} s), "
            f"decode {run.decode_tokens_per_second:6.1f} tokens/s"
        )
    agree = "identical" if comparison.tokens_agree else f"different after {comparison.agreeing_tokens}"
    print(f"-- largest logit difference {comparison.max_logit_difference:.1e}, greedy tokens {agree}")
    return {
        "prompt_tokens": served.prompt_tokens,
        "continuation": as_text(served.tokens),
        "calls": dict(served.calls),
        "comparison": vars(comparison),
        "speeds": {
            name: {
                "prefill_tokens_per_second": run.prefill_tokens_per_second,
                "decode_tokens_per_second": run.decode_tokens_per_second,
            }
            for name, run in runs.items()
        },
    }


def sweep(op: str, model: Any) -> dict[str, list[dict[str, float]]]:
    """Prefill time against length on both paths, the repeats interleaved; the least time of each counts.

    A path stops before a length that would take it beyond `SWEEP_SECONDS`: twice the tokens take twice the time.
    """
    ids = as_ids(prompt_text(max(LENGTHS)))
    points: dict[str, list[dict[str, float]]] = {name: [] for name in PATHS}
    spent = dict.fromkeys(PATHS, 0.0)
    for length in LENGTHS:
        running = [
            name
            for name, measured in points.items()
            if not measured or spent[name] + 2 * REPEATS * measured[-1]["seconds"] <= SWEEP_SECONDS
        ]
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(REPEATS):
            for name in running:
                seconds[name].append(PATHS[name](model, ids[:, :length], 1, PIECE).prefill_seconds)
        for name, times in seconds.items():
            spent[name] += sum(times)
            points[name].append({"tokens": length, "seconds": min(times)})
            print(f"{op} prefill of {length} tokens on {name}: {min(times):.2f} s", file=sys.stderr)
    return points


def plot(results: dict[str, Any], path: Path) -> None:
    """One panel per model: prefill seconds against tokens for both paths, on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(results["models"]), sharey=True)
    for axes, (op, record) in zip(panels, results["models"].items(), strict=True):
        for name, color, marker, label_offset in [("fla_npu", "C0", "o", -13), ("transformers", "C1", "s", 6)]:
            points = record["sweep"][name]
            axes.plot(
                [point["tokens"] for point in points],
                [point["seconds"] for point in points],
                color=color,
                marker=marker,
                markersize=4,
                label=name,
            )
            axes.annotate(
                f"{points[-1]['seconds']:.2g} s",
                (points[-1]["tokens"], points[-1]["seconds"]),
                textcoords="offset points",
                xytext=(0, label_offset),
                ha="center",
                fontsize=8,
                color=color,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(LENGTHS, [f"{length // 1024}K" for length in LENGTHS])
        axes.set_xlim(LENGTHS[0] / 1.3, LENGTHS[-1] * 1.3)
        axes.set_xlabel("prompt length (bytes = tokens)")
        notes = [
            f"{name} up to {points[-1]['tokens'] // 1024}K only: {SWEEP_SECONDS:.0f} s per line"
            for name, points in record["sweep"].items()
            if points[-1]["tokens"] < max(LENGTHS)
        ]
        axes.set_title("\n".join([MODELS[op], *notes]), fontsize=10)
        axes.grid(alpha=0.3, which="both")
        axes.legend(loc="upper left")
    panels[0].set_ylabel("prefill time of the whole model (s)")
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high * 1.6)
    figure.suptitle(f"Prefill on a CPU, {results['threads']} thread(s), fp32, in pieces of {PIECE} tokens", fontsize=11)
    figure.savefig(path)


@click.command(help=__doc__.split("\n")[0])
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/demo"), show_default=True)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: PyTorch's choice]")
def main(out: Path, threads: int | None) -> None:
    started = time.perf_counter()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    results: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {
            "fla_npu": fla_npu.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "models": {},
    }
    for op in MODELS:
        model = load(model_folder(op), torch.float32)
        record = generate_and_compare(op, model)
        record["sweep"] = sweep(op, model)
        results["models"][op] = record
    out.mkdir(parents=True, exist_ok=True)
    plot(results, out / "prefill.png")
    (out / "demo.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwrote {out / 'prefill.png'} and {out / 'demo.json'} in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
