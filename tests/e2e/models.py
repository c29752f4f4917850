"""Every model of the installed transformers with Gated DeltaNet or KDA layers, at a tiny size, without a download.

Comparisons need models that are continuous in their arithmetic: routers take all experts and indexed attention takes
all tokens, else a difference in the last bit may choose another expert.
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from fla_npu.integrations.transformers import OPS, torch_path
from tests.tiny_models import COMMON, CONFIGS, QWEN_LINEAR

ALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
QWEN_MOE = {**QWEN_LINEAR, **ALL_EXPERTS, "shared_expert_intermediate_size": 32}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": COMMON["hidden_size"],
}
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 5, 6, 7, 8
MARKERS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
FIRST_WORD = 10
"""Token ids from here on are text."""


@dataclass(frozen=True)
class Tiny:
    """How to build a model."""

    config: str
    """Configuration class of the text model."""
    values: dict[str, Any]
    kda: bool = False
    whole: str | None = None
    """Configuration class of the model with a vision tower."""
    vision: dict[str, Any] = field(default_factory=dict)
    text_alone: bool = True
    """Whether there is a causal language model without the vision tower."""


def _known(family: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    config, values = CONFIGS[family]
    return config, {**values, **changes}


MODELS = {
    "qwen3_next": Tiny(*_known("Qwen3Next", num_experts_per_tok=4)),
    "qwen3_5": Tiny(*_known("Qwen3_5"), whole="Qwen3_5Config", vision={"num_position_embeddings": 16}),
    "qwen3_5_moe": Tiny(
        "Qwen3_5MoeTextConfig", QWEN_MOE, whole="Qwen3_5MoeConfig", vision={"num_position_embeddings": 16}
    ),
    "qwen4_exp": Tiny(
        "Qwen4ExpTextConfig",
        {
            **QWEN_MOE,
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 512,
            "indexer_compress_ratio": 4,
        },
    ),
    "olmo_hybrid": Tiny(*_known("OlmoHybrid")),
    "lara_mini": Tiny("LaraMiniConfig", {**QWEN_MOE, "head_dim": 16}),
    "kimi_linear": Tiny(*_known("KimiLinear", num_experts_per_tok=4), kda=True),
    "bailing_hybrid": Tiny(
        "BailingHybridConfig",
        {
            "layer_types": None,
            "layer_group_size": 4,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        kda=True,
    ),
    "glm5_next": Tiny(
        "Glm5NextTextConfig",
        {
            "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "index_topk": 512,
            "index_head_dim": 16,
            "index_n_heads": 4,
            "index_kpool": 2,
            "hc_mult": 2,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
        },
        kda=True,
        whole="Glm5NextConfig",
        vision={"image_size": 16, "projection_intermediate_size": 64},
        text_alone=False,
    ),
}
"""Folder in `transformers/models` -> the model in it."""


def found() -> list[str]:
    """Folders in `transformers/models` whose modeling file defines a delta rule, read as text."""
    defines = re.compile(rf"^def ({'|'.join(OPS)})\(", re.MULTILINE)
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    return sorted(file.parent.name for file in files if defines.search(file.read_text(encoding="utf-8")))


HERE = [name for name in found() if name in MODELS]
"""Those of the installed transformers that can be built."""

WITH_VISION = [name for name in HERE if MODELS[name].whole]


def modeling(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def text_config(name: str) -> Any:
    tiny = MODELS[name]
    values = {key: value for key, value in {**COMMON, **tiny.values}.items() if value is not None}
    return getattr(transformers, tiny.config)(**values)


def build(name: str, *, vision: bool = False) -> Any:
    """A randomly initialised language model in eval mode, with the same parameters at every call."""
    tiny = MODELS[name]
    if vision or not tiny.text_alone:
        assert tiny.whole is not None
        tower = {**VISION, **tiny.vision}
        text = text_config(name).to_dict()
        config = getattr(transformers, tiny.whole)(text_config=text, vision_config=tower, **MARKERS)
        suffix = "ForConditionalGeneration"
    else:
        config, suffix = text_config(name), "ForCausalLM"
    module = modeling(name)
    classes = [c for n, c in vars(module).items() if n.endswith(suffix) and c.__module__ == module.__name__]
    torch.manual_seed(0)
    return classes[0]._from_config(config).eval()


@functools.cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model shared by tests that leave it as it is."""
    return build(name).to(dtype)


def words(seed: int, *shape: int) -> torch.Tensor:
    """Random text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, COMMON["vocab_size"], shape, generator=generator)


@contextmanager
def by_tokens(name: str) -> Iterator[None]:
    """transformers' recurrent function instead of its chunked one: the same sums in another order."""
    module = modeling(name)
    with pytest.MonkeyPatch.context() as patch, torch_path():
        for chunk, recurrent in (
            ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
            ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
        ):
            if hasattr(module, chunk):
                patch.setattr(module, chunk, getattr(module, recurrent))
        yield


def expectation(name: str, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What transformers computes, and how far from it another correct evaluation may be.

    transformers has two algorithms for the op, by chunks and by tokens, whose results differ by rounding alone. A third
    one's error is of the same kind; 4 allows for its own order of summation.
    """
    with torch_path() as report:
        expected = run()
    assert sum(report.calls.values()), "transformers' own functions did not run"
    with by_tokens(name):
        other = run()
    return expected, 4 * float((expected - other).abs().max())
