"""Hybrid transformers models of a quarter million parameters, built from configuration classes without a download."""

from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
# Grouped value heads: HV = 4, Hk = 2.
QWEN_LINEAR = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIGS = {
    "Qwen3_5": ("Qwen3_5TextConfig", {**QWEN_LINEAR, "intermediate_size": 128}),
    "Qwen3Next": (
        "Qwen3NextConfig",
        {**QWEN_LINEAR, **EXPERTS, "intermediate_size": 128, "shared_expert_intermediate_size": 32},
    ),
    # K != V and neither a power of two.
    "OlmoHybrid": (
        "OlmoHybridConfig",
        {
            "intermediate_size": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 24,
        },
    ),
    "KimiLinear": (
        "KimiLinearConfig",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
        },
    ),
}


def tiny_model(family: str, **overrides: Any) -> Any:
    """A randomly initialised model in eval mode, with the same parameters at every call."""
    config_class, extra = CONFIGS[family]
    config = getattr(transformers, config_class)(**{**COMMON, **extra, **overrides})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()
