"""Small models of every kind, and comparisons of what they return."""

from typing import Any

import torch

from fla_npu.models import (
    DeltaNetForCausalLM,
    GatedDeltaNetForCausalLM,
    GatedDeltaProductForCausalLM,
    GLAForCausalLM,
    KDAForCausalLM,
    Mamba2ForCausalLM,
    RetNetForCausalLM,
)
from fla_npu.models.configuration_utils import FLAConfig
from fla_npu.utils import get_err_ratio

VOCABULARY = 61
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2}
WINDOW = {"layers": [0, 2], "num_heads": 2, "window_size": 5}

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "delta": (DeltaNetForCausalLM, {"num_heads": 2, "expand_k": 0.5}),
    "gdn": (GatedDeltaNetForCausalLM, {"head_dim": 8, "num_heads": 2, "num_v_heads": 4}),
    "gla": (GLAForCausalLM, {"num_heads": 4, "num_kv_heads": 2}),
    "kda": (KDAForCausalLM, {"head_dim": 8, "num_heads": 2, "num_v_heads": 4}),
    "mamba": (Mamba2ForCausalLM, {"head_dim": 8, "state_size": 16, "n_groups": 2}),
    "product": (
        GatedDeltaProductForCausalLM,
        {"head_dim": 8, "num_heads": 2, "num_householder": 2, "use_forget_gate": True, "allow_neg_eigval": True},
    ),
    "retnet": (RetNetForCausalLM, {"num_heads": 4, "num_kv_heads": 2}),
}
"""The class and the sizes of its layers."""

KINDS: dict[str, dict[str, Any]] = {
    "delta": {},
    "delta gated": {"use_gate": True, "allow_neg_eigval": True, "qk_norm": "sum", "qk_activation": "elu"},
    "gdn": {},
    "gdn hybrid": {"attn": ATTENTION, "expand_v": 1.0},
    "gdn window": {"attn": [WINDOW, ATTENTION]},
    "gla": {},
    "gla hybrid": {"attn": ATTENTION, "use_short_conv": True, "fuse_norm": False, "clamp_min": -1.0},
    "kda": {},
    "kda hybrid": {"attn": ATTENTION, "safe_gate": True, "lower_bound": -5.0},
    "kda residuals": {"attnres_block_size": 2},
    "mamba": {},
    "mamba ungated": {"rmsnorm": False, "D_has_hdim": True, "residual_in_fp32": False, "dt_limit": (0.01, 0.1)},
    "product": {},
    "product hybrid": {"attn": ATTENTION, "use_forget_gate": False},
    "retnet": {},
    "retnet residuals": {"attnres_block_size": 1, "use_output_gate": False},
}
"""The first word is the family."""

ROUNDING = 2e-5
"""Of the root mean square of logits: fp32 through three layers whose sums have up to 64 terms, in two orders. Measured:
up to 2e-6."""


def make(kind: str, seed: int = 0, **options: Any) -> Any:
    configuration = config(kind, **options)
    torch.manual_seed(seed)
    return family(kind)(configuration).eval()


def family(kind: str) -> Any:
    return FAMILIES[kind.split()[0]][0]


def config(kind: str, **options: Any) -> FLAConfig:
    sizes = FAMILIES[kind.split()[0]][1]
    return family(kind).config_class(**{**SIZES, **sizes, **KINDS[kind], **options})


def tokens(batch: int = 2, length: int = 23, seed: int = 1) -> torch.Tensor:
    # Without 1 and 2, which begin and end a text.
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, expected: torch.Tensor, limit: float = ROUNDING) -> None:
    assert got.shape == expected.shape
    assert get_err_ratio(expected.double(), got.double()) < limit
