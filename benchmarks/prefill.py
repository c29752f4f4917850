"""`python -m benchmarks.prefill`: a long prompt through whole models of transformers, on transformers' own functions,
with this package's ops, and with its whole layers.

    python -m benchmarks.prefill --out benchmarks/results
    python -m benchmarks.prefill --quick --out out/prefill      short prompts: does everything run

Three linear-attention layers and one of full attention, one forward over the whole prompt into a cache, fp32, one
thread. The paths take turns in one process; memory is measured in a fresh process for each. `linear_s` is the part of
the time in the linear-attention layers: projections, convolution, op and norm.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

import fla_npu
from benchmarks import measure, plots
from benchmarks.report import TITLES, duration
from benchmarks.rows import timed
from benchmarks.run import ROOT, describe_run
from fla_npu.integrations.transformers import torch_path

LENGTHS = (1024, 4096, 16384)
QUICK_LENGTHS = (128, 256)
ROUNDS = 5
ONCE_SECONDS = 45.0
"""A path that takes longer is measured once: its difference to the others exceeds any spread."""
SEED = 0
COMMON = {"vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "intermediate_size": 1024}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gdn": (
        "Qwen3_5TextConfig",
        {"num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 4},
    ),
    "kda": (
        "KimiLinearConfig",
        {
            "linear_num_heads": 4,
            "linear_head_dim": 128,
            "num_key_value_heads": 4,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 96,
            "v_head_dim": 128,
            "mlp_layer_types": ["dense"] * 4,
        },
    ),
}
"""Op -> configuration of a dense model with heads of 128."""
NAMES = {"gdn": "Qwen3.5", "kda": "Kimi-Linear"}

PATHS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "transformers": torch_path,
    "ops": fla_npu.enabled,
    "layers": partial(fla_npu.enabled, layers=True),
}
LABELS = {"transformers": "transformers", "ops": "fla_npu, ops", "layers": "fla_npu, whole layers"}
COLOURS = {"transformers": "#1f77b4", "ops": "#e58fa0", "layers": "#c8102e"}


@dataclass
class Prefill:
    """A model, and what its last prefill took as a whole and in its linear-attention layers."""

    op: str
    model: Any = field(init=False)
    seconds: float = 0.0
    linear_seconds: float = 0.0

    def __post_init__(self) -> None:
        import transformers

        config, values = MODELS[self.op]
        torch.manual_seed(SEED)
        config = getattr(transformers, config)(**{**COMMON, **TOKENS, **LAYERS, **values})
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for layer in self.model.modules():
            if hasattr(layer, "conv1d"):
                layer.register_forward_pre_hook(self._enter)
                layer.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self.linear_seconds -= time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self.linear_seconds += time.perf_counter()

    def run(self, path: str, ids: torch.Tensor) -> list[torch.Tensor]:
        """The logits after the prompt. Which path it takes is settled outside the clock."""
        with PATHS[path](), torch.inference_mode():
            self.linear_seconds, start = 0.0, time.perf_counter()
            logits = self.model(ids, use_cache=True, logits_to_keep=1).logits
            self.seconds = time.perf_counter() - start
        return [logits]


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(COMMON["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(SEED))


def time_case(op: str, tokens: int, rounds: int, progress: tqdm) -> list[dict[str, Any]]:
    """A row for each path, measured in turns."""
    prefill, ids = Prefill(op), prompt(tokens)
    load = measure.OtherLoad()
    whole: dict[str, list[float]] = {path: [] for path in PATHS}
    linear: dict[str, list[float]] = {path: [] for path in PATHS}
    logits = {path: prefill.run(path, ids[:, :256])[0] for path in PATHS}
    for _ in range(rounds):
        for path in PATHS:
            if not whole[path] or max(whole[path]) < ONCE_SECONDS:
                logits[path] = prefill.run(path, ids)[0]
                whole[path].append(prefill.seconds)
                linear[path].append(prefill.linear_seconds)
            progress.update()
    return [
        {
            "op": op,
            "path": path,
            "T": tokens,
            **timed(whole[path]),
            "linear_s": statistics.median(linear[path]),
            "logit_difference": float((logits[path] - logits["transformers"]).abs().max()),
            "other_cores": round(load.cores(), 3),
            "load_average": os.getloadavg()[0],
        }
        for path in PATHS
    ]


def memory_of(op: str, path: str, tokens: int) -> int:
    """Peak bytes of a prefill beyond the model, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.prefill", "--memory-of", op, path, str(tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def measure_memory(op: str, path: str, tokens: int) -> int:
    prefill = Prefill(op)
    prefill.run(path, prompt(64))
    return measure.first_call(lambda: prefill.run(path, prompt(tokens))).extra_bytes


def draw(path: Path, records: list[dict[str, Any]]) -> Path:
    """Time and memory along the prompt's length, a column per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = [op for op in MODELS if any(r["op"] == op for r in records)]
    figure, axes = pyplot.subplots(2, len(ops), figsize=(11, 7.5), squeeze=False, sharex=True, sharey="row")
    for column, op in enumerate(ops):
        times, memory = axes[0][column], axes[1][column]
        for name, colour in COLOURS.items():
            here = sorted((r for r in records if (r["op"], r["path"]) == (op, name)), key=lambda r: r["T"])
            lengths = [r["T"] for r in here]
            style = {"color": colour, "marker": "o", "label": LABELS[name]}
            times.plot(lengths, [r["median_s"] for r in here], **style)
            times.plot(lengths, [r["linear_s"] for r in here], color=colour, linestyle=":", marker=".")
            memory.plot(lengths, [r["extra_bytes"] / 1e6 for r in here], **style)
            last = here[-1]
            if name != "ops":
                text = f" {duration(last['median_s'])}"
                times.annotate(text, (last["T"], last["median_s"]), va="center", fontsize=8)
                text = f" {last['extra_bytes'] / 1e6:.0f} MB"
                memory.annotate(text, (last["T"], last["extra_bytes"] / 1e6), va="center", fontsize=8)
        times.set(xscale="log", yscale="log", title=f"{TITLES[op]}: {NAMES[op]}")
        memory.set(xscale="log", yscale="log", xlabel="T, tokens of the prompt")
        times.set_xscale("log", base=2)
        lengths = sorted({r["T"] for r in records})
        times.set_xticks(lengths, [str(length) for length in lengths])
        times.set_xlim(lengths[0] * 0.85, lengths[-1] * 2.2)
        for axis in (times, memory):
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("prefill, s (dotted: linear-attention layers)")
    axes[1][0].set_ylabel("peak beyond the model, MB")
    axes[0][0].legend(frameon=False)
    figure.suptitle("3 linear-attention layers and 1 of full attention, hidden 512, 4 heads of 128, fp32, 1 thread")
    figure.tight_layout()
    return plots.save(figure, path)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: times, and what transformers takes over the others."""
    lines = [
        "| model | T | path | prefill | transformers over it | linear layers | transformers over them | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    theirs = {(r["op"], r["T"]): r for r in records if r["path"] == "transformers"}
    for r in records:
        peer = theirs[r["op"], r["T"]]
        lines.append(
            f"| {NAMES[r['op']]} | {r['T']} | {LABELS[r['path']]} | {duration(r['median_s'])} "
            f"| {peer['median_s'] / r['median_s']:.2f}x | {duration(r['linear_s'])} "
            f"| {peer['linear_s'] / r['linear_s']:.2f}x | {r['extra_bytes'] / 1e6:.0f} MB |"
        )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "benchmarks" / "results", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True, help="Samples of each path.")
@click.option("--quick", is_flag=True, help="Short prompts and two rounds.")
@click.option("--plot", "only_plot", is_flag=True, help="Draw and print the rows that are there.")
@click.option("--memory-of", type=(str, str, int), hidden=True)
def main(out: Path, rounds: int, quick: bool, only_plot: bool, memory_of: tuple[str, str, int] | None) -> None:
    torch.set_num_threads(1)
    if memory_of is not None:
        click.echo(measure_memory(*memory_of))
        return
    file = out / "prefill.json"
    if not only_plot:
        out.mkdir(parents=True, exist_ok=True)
        run(file, QUICK_LENGTHS if quick else LENGTHS, 2 if quick else rounds)
    records = json.loads(file.read_text())["rows"]
    click.echo(table(records))
    click.echo(draw(out / "prefill.png", records), err=True)


def run(file: Path, lengths: tuple[int, ...], rounds: int) -> None:
    """Measure everything into `file`, which is written after every case."""
    description, records = describe_run("prefill"), []
    cases = [(op, tokens) for op in MODELS for tokens in lengths]
    with tqdm(total=len(cases) * len(PATHS) * (rounds + 1), unit="prefill", file=sys.stderr) as progress:
        for op, tokens in cases:
            progress.set_description(f"{op}, {tokens} tokens")
            rows = time_case(op, tokens, rounds, progress)
            for row in rows:
                row["extra_bytes"] = memory_of(op, row["path"], tokens)
                progress.update()
            records += rows
            file.write_text(json.dumps({"runs": [description], "rows": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
