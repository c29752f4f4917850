"""Train the byte-level hybrid language models that ship in `fla_npu/assets`.

    python -m examples.train_bytes --op gdn --out out/gdn-bytes
    python -m examples.train_bytes --op kda --out out/kda-bytes

Each model has four layers, three of linear attention and one of full attention, and about 1M parameters: `gdn` in the
shape of Qwen3.5, `kda` in that of Kimi-Linear (dense MLPs). The model is built from the transformers configuration,
its linear-attention layers are replaced by `fla_npu.layers.GatedDeltaNet` / `KimiDeltaAttention`, so that forward and
backward run on this package, and the trained weights are converted back: the result loads in plain transformers.
Kimi-Linear's output gate has no bias, so that of `KimiDeltaAttention` stays frozen at zero.

Text: the Python standard library of the interpreter that runs this (see `fla_npu.assets.stdlib_text`). It was chosen
because everybody who can run this has it and its licence (PSF-2.0) allows redistribution of derived works. About one
document in twenty is held out and gives the validation loss. Losses are in nats per byte.

Writes `config.json`, `generation_config.json`, `model.safetensors` (bf16), `training.json` and `loss.png` to the output
folder, and keeps `checkpoint.pt` there until the run is complete. The batch of a step depends only on the seed and the
step, so an interrupted run (Ctrl-C) that continues with `--resume` sees the same data as an uninterrupted one.
"""

import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from tqdm import tqdm

from fla_npu import __version__, enabled
from fla_npu.assets import stdlib_text
from fla_npu.integrations import convert
from fla_npu.layers import GatedDeltaNet, KimiDeltaAttention


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result of a run."""

    op: str = "gdn"
    steps: int = 1000
    batch: int = 4
    seq_len: int = 512
    learning_rate: float = 1e-2
    final_learning_rate: float = 5e-4
    warmup: int = 50
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    seed: int = 0
    threads: int = 1
    hidden_size: int = 128
    validate_every: int = 100
    validation_windows: int = 64

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_learning_rate` at the last step."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * cosine


@dataclass(frozen=True)
class Family:
    """How one kind of linear-attention layer sits in its transformers model."""

    make_config: Callable[[int], Any]
    """Hidden size -> transformers configuration."""
    attribute: str
    """Name of the layer in a decoder layer."""
    make_layer: Callable[[Any], nn.Module]
    """Configuration -> layer of this package."""
    export_layer: Callable[[convert.State], dict[str, torch.Tensor]]
    """State of that layer -> state of the transformers layer."""


def qwen3_5_config(hidden_size: int) -> Any:
    """Qwen3.5 text model on bytes: 1.09M parameters at hidden size 128, with embeddings and head tied."""
    return transformers.Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=hidden_size // 32,
        linear_num_value_heads=hidden_size // 16,
        tie_word_embeddings=True,
        max_position_embeddings=65536,
    )


def kimi_linear_config(hidden_size: int) -> Any:
    """Kimi-Linear model on bytes: 1.01M parameters at hidden size 128. Its head cannot be tied in transformers."""
    return transformers.KimiLinearConfig(
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        linear_head_dim=32,
        linear_num_heads=hidden_size // 16,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        # A mixture of experts would cost far more time than it gives at this size.
        mlp_layer_types=["dense"] * 4,
        max_position_embeddings=65536,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def make_kimi_delta_attention(config: Any) -> nn.Module:
    """The KDA layer of a Kimi-Linear configuration, its output-gate bias frozen at zero so that it can go back."""
    layer = KimiDeltaAttention(**convert.kimi_delta_attention_arguments(config))
    layer.g_proj[1].bias.requires_grad_(False).zero_()
    return layer


FAMILIES = {
    "gdn": Family(
        make_config=qwen3_5_config,
        attribute="linear_attn",
        make_layer=lambda config: GatedDeltaNet(**convert.gated_deltanet_arguments(config)),
        export_layer=convert.gated_deltanet_to_qwen3_5,
    ),
    "kda": Family(
        make_config=kimi_linear_config,
        attribute="self_attn",
        make_layer=make_kimi_delta_attention,
        export_layer=convert.kimi_delta_attention_to_kimi_linear,
    ),
}


class LayerSlot(nn.Module):
    """One of this package's layers behind the call of a transformers decoder layer, without a cache."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> torch.Tensor:
        if cache is not None:
            raise ValueError("a training slot keeps no states: call the model with use_cache=False")
        return self.layer(hidden_states)[0]


def build_model(settings: Settings) -> nn.Module:
    """The transformers model of `settings.op` with every linear-attention layer replaced by this package's."""
    family = FAMILIES[settings.op]
    torch.manual_seed(settings.seed)
    config = family.make_config(settings.hidden_size)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for decoder_layer, kind in zip(model.model.layers, config.layer_types, strict=True):
        if kind == "linear_attention":
            setattr(decoder_layer, family.attribute, LayerSlot(family.make_layer(config)))
    return model


def to_transformers(model: nn.Module, op: str) -> Any:
    """A plain transformers model with the weights of a model from `build_model`."""
    family = FAMILIES[op]
    plain = transformers.AutoModelForCausalLM.from_config(model.config)
    state = {name: tensor for name, tensor in model.state_dict().items() if f".{family.attribute}.layer." not in name}
    for index, decoder_layer in enumerate(model.model.layers):
        slot = getattr(decoder_layer, family.attribute, None)
        if isinstance(slot, LayerSlot):
            prefix = f"model.layers.{index}.{family.attribute}."
            exported = family.export_layer(slot.layer.state_dict())
            state.update({prefix + name: tensor for name, tensor in exported.items()})
    plain.load_state_dict(state)
    return plain.eval()


def load_text(held_out: bool) -> torch.Tensor:
    """One side of the standard library's text as a uint8 tensor.

    Raises:
        click.ClickException: this interpreter has no source files.
    """
    text = b"\n\n".join(text for _, text in stdlib_text.documents(held_out))
    if len(text) < 65536:
        raise click.ClickException("this Python has no standard-library sources to train on: use a full installation")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch_at(text: torch.Tensor, settings: Settings, step: int) -> torch.Tensor:
    """The token ids `[batch, seq_len + 1]` of one step; a function of the seed and the step only."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - settings.seq_len, (settings.batch,), generator=generator)
    return text[starts[:, None] + torch.arange(settings.seq_len + 1)].long()


def next_byte_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte of `ids[:, 1:]` given what precedes; ids `[B, T + 1]`."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, text: torch.Tensor, settings: Settings) -> float:
    """Mean loss over `validation_windows` evenly spaced windows of the held-out text."""
    starts = torch.linspace(0, len(text) - settings.seq_len - 1, settings.validation_windows).long()
    windows = text[starts[:, None] + torch.arange(settings.seq_len + 1)].long()
    was_training = model.training
    model.eval()
    losses = [next_byte_loss(model, part).item() for part in windows.split(settings.batch)]
    model.train(was_training)
    weights = [len(part) for part in windows.split(settings.batch)]
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; matrices decay, and vectors (norms, A_log, dt_bias) and convolutions do not."""
    decayed, kept = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim == 2 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))


@contextmanager
def stop_request() -> Iterator[list[bool]]:
    """A list that is empty until Ctrl-C, so that the step in progress ends before the run does."""
    requests: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: requests.append(True))
    try:
        yield requests
    finally:
        signal.signal(signal.SIGINT, before)


def save_checkpoint(path: Path, **content: Any) -> None:
    """Write a checkpoint so that a crash in between leaves the previous one."""
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)


def train(settings: Settings, out: Path, resume: bool = False) -> bool:
    """Train, and write the results to `out`. Returns False when the run was interrupted and can be resumed.

    Raises:
        click.ClickException: `resume` without a checkpoint, or with one of other settings.
    """
    torch.set_num_threads(settings.threads)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint_path = out / "checkpoint.pt"
    text, held_out = load_text(held_out=False), load_text(held_out=True)
    model = build_model(settings).train()
    optimizer = make_optimizer(model, settings)
    step, seconds = 0, 0.0
    log: dict[str, list[tuple[int, float]]] = {"training": [], "validation": []}
    if resume:
        if not checkpoint_path.exists():
            raise click.ClickException(f"nothing to resume: {checkpoint_path} does not exist")
        checkpoint = torch.load(checkpoint_path, weights_only=True)
        if checkpoint["settings"] != asdict(settings):
            raise click.ClickException(f"{checkpoint_path} was made with other settings: {checkpoint['settings']}")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step, seconds, log = checkpoint["step"], checkpoint["seconds"], checkpoint["log"]

    with stop_request() as stop, tqdm(total=settings.steps, initial=step, unit="step", file=sys.stderr) as bar:
        while step < settings.steps and not stop:
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate_at(step)
            loss = next_byte_loss(model, batch_at(text, settings, step))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
            optimizer.step()
            step += 1
            seconds += time.perf_counter() - started
            log["training"].append((step, round(loss.item(), 4)))
            if step % settings.validate_every == 0 or step == settings.steps:
                log["validation"].append((step, round(validation_loss(model, held_out, settings), 4)))
                bar.set_postfix(validation=log["validation"][-1][1])
            if step % settings.validate_every == 0 or step == settings.steps or stop:
                save_checkpoint(
                    checkpoint_path,
                    settings=asdict(settings),
                    model=model.state_dict(),
                    optimizer=optimizer.state_dict(),
                    step=step,
                    seconds=seconds,
                    log=log,
                )
            bar.update()
    if step < settings.steps:
        print(f"stopped after step {step}; continue with --resume", file=sys.stderr)
        return False

    plain = to_transformers(model, settings.op)
    plain.to(torch.bfloat16).save_pretrained(out)
    shipped = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with enabled():
        shipped_loss = validation_loss(shipped, held_out, settings)
    record = {
        "settings": asdict(settings),
        "parameters": sum(parameter.numel() for parameter in shipped.parameters()),
        "text": {
            "source": f"standard library of Python {platform.python_version()}, PSF-2.0",
            "training_bytes": len(text),
            "held_out_bytes": len(held_out),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "fla_npu": __version__,
        },
        "unit": "nats per byte",
        "seconds": round(seconds, 1),
        "validation_loss": log["validation"][-1][1],
        "validation_loss_bf16_weights": round(shipped_loss, 4),
        "losses": log,
    }
    (out / "training.json").write_text(json.dumps(record) + "\n")
    plot_losses(record, out / "loss.png")
    checkpoint_path.unlink()
    return True


def plot_losses(record: dict[str, Any], path: Path) -> None:
    """Loss curve of a finished run as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*record["losses"]["training"], strict=True), color="0.75", linewidth=0.8, label="training batch")
    axes.plot(
        *zip(*record["losses"]["validation"], strict=True), color="C0", marker="o", markersize=3, label="held out"
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title(
        f"{record['settings']['op']}-bytes: {record['parameters'] / 1e6:.2f}M parameters, "
        f"held-out loss {record['validation_loss']:.3f}, {record['seconds'] / 60:.1f} min on "
        f"{record['settings']['threads']} thread(s)",
        fontsize=9,
    )
    axes.set_ylim(0, 4)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


@click.command(help=__doc__.split("\n")[0])
@click.option("--op", type=click.Choice(sorted(FAMILIES)), default=Settings.op, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=Settings.steps, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=Settings.batch, show_default=True)
@click.option("--seq-len", type=click.IntRange(1), default=Settings.seq_len, show_default=True)
@click.option("--learning-rate", type=float, default=Settings.learning_rate, show_default=True)
@click.option("--seed", type=int, default=Settings.seed, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=Settings.threads, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Output folder.")
@click.option("--resume", is_flag=True, help="Continue the interrupted run in the output folder.")
def main(out: Path, resume: bool, **options: Any) -> None:
    if not train(Settings(**options), out, resume):
        sys.exit(130)


if __name__ == "__main__":
    main()
