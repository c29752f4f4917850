"""Small models of every kind, and comparisons of what they return."""

from typing import Any

import torch

from fla_npu.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM, KDAConfig, KDAForCausalLM
from fla_npu.utils import get_err_ratio

VOCABULARY = 61
SIZES = {
    "hidden_size": 32,
    "head_dim": 8,
    "num_heads": 2,
    "num_v_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2}
WINDOW = {"layers": [0, 2], "num_heads": 2, "window_size": 5}

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "gdn": (GatedDeltaNetForCausalLM, {}),
    "gdn hybrid": (GatedDeltaNetForCausalLM, {"attn": ATTENTION, "expand_v": 1.0}),
    "gdn window": (GatedDeltaNetForCausalLM, {"attn": [WINDOW, ATTENTION]}),
    "kda": (KDAForCausalLM, {}),
    "kda hybrid": (KDAForCausalLM, {"attn": ATTENTION, "safe_gate": True, "lower_bound": -5.0}),
    "kda residuals": (KDAForCausalLM, {"attnres_block_size": 2}),
}

ROUNDING = 2e-5
"""Of the root mean square of logits: fp32 through three layers whose sums have up to 64 terms, in two orders. Measured:
up to 2e-6."""


def make(kind: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    family, fields = KINDS[kind]
    return family(family.config_class(**{**SIZES, **fields, **options})).eval()


def config(kind: str, **options: Any) -> GatedDeltaNetConfig | KDAConfig:
    family, fields = KINDS[kind]
    return family.config_class(**{**SIZES, **fields, **options})


def tokens(batch: int = 2, length: int = 23, seed: int = 1) -> torch.Tensor:
    # Without 1 and 2, which begin and end a text.
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, expected: torch.Tensor, limit: float = ROUNDING) -> None:
    assert got.shape == expected.shape
    assert get_err_ratio(expected.double(), got.double()) < limit
