"""Weights of this package's layers from and to those of transformers' layers.

| transformers                                      | here                 | exact when              |
|---------------------------------------------------|----------------------|-------------------------|
| `Qwen3_5GatedDeltaNet`, `Qwen3_5MoeGatedDeltaNet` | `GatedDeltaNet`      | always                  |
| `KimiLinearDeltaAttention`                        | `KimiDeltaAttention` | `g_proj.1.bias` is zero |

Every function takes and returns the `state_dict` of one layer and copies no data where a view will do, so clone before
you train on both sides. transformers keeps q, k, v in one convolution (and Qwen3.5 in one projection too) where
`fla_npu.layers` has three, and Kimi-Linear's output gate has no bias. In fp32 a converted layer computes the same
numbers up to rounding; in bf16 the gated norm of Qwen3.5 rounds once more than FLA's does.
"""

from collections.abc import Mapping
from typing import Any

import torch

State = Mapping[str, torch.Tensor]

QWEN3_5_NAMES = {
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "a_proj.weight": "in_proj_a.weight",
    "b_proj.weight": "in_proj_b.weight",
    "g_proj.weight": "in_proj_z.weight",
    "o_norm.weight": "norm.weight",
    "o_proj.weight": "out_proj.weight",
}
"""`GatedDeltaNet` -> `Qwen3_5GatedDeltaNet`, for the tensors that only change their name."""

KIMI_LINEAR_NAMES = {
    "q_proj.weight": "q_proj.weight",
    "k_proj.weight": "k_proj.weight",
    "v_proj.weight": "v_proj.weight",
    "b_proj.weight": "b_proj.weight",
    "f_proj.0.weight": "forget_gate.f_a_proj.weight",
    "f_proj.1.weight": "forget_gate.f_b_proj.weight",
    "dt_bias": "forget_gate.dt_bias",
    "g_proj.0.weight": "g_a_proj.weight",
    "g_proj.1.weight": "g_b_proj.weight",
    "o_norm.weight": "o_norm.weight",
    "o_proj.weight": "o_proj.weight",
}
"""`KimiDeltaAttention` -> `KimiLinearDeltaAttention`, for the tensors that only change their name."""


def gated_deltanet_arguments(config: Any) -> dict[str, Any]:
    """Constructor arguments of the `GatedDeltaNet` that equals the linear-attention layers of a Qwen3.5 text config."""
    return {
        "hidden_size": config.hidden_size,
        "head_dim": config.linear_key_head_dim,
        "expand_v": config.linear_value_head_dim / config.linear_key_head_dim,
        "num_heads": config.linear_num_key_heads,
        "num_v_heads": config.linear_num_value_heads,
        "conv_size": config.linear_conv_kernel_dim,
        "norm_eps": config.rms_norm_eps,
    }


def kimi_delta_attention_arguments(config: Any) -> dict[str, Any]:
    """Constructor arguments of the `KimiDeltaAttention` that equals the KDA layers of a Kimi-Linear config."""
    return {
        "hidden_size": config.hidden_size,
        "head_dim": config.linear_head_dim,
        "expand_v": 1,
        "num_heads": config.linear_num_heads,
        "conv_size": config.linear_conv_kernel_dim,
        "norm_eps": config.rms_norm_eps,
    }


def gated_deltanet_to_qwen3_5(state: State) -> dict[str, torch.Tensor]:
    """State of a `GatedDeltaNet` (with output gate and short convolution) -> state of a `Qwen3_5GatedDeltaNet`.

    Raises:
        ValueError: the layer has a tensor that Qwen3.5 has no place for, or lacks one that it needs.
    """
    _check_names(state, {*QWEN3_5_NAMES, *_three("{}_proj.weight"), *_three("{}_conv1d.weight")}, "GatedDeltaNet")
    converted = {theirs: state[ours] for ours, theirs in QWEN3_5_NAMES.items()}
    converted["in_proj_qkv.weight"] = torch.cat([state[name] for name in _three("{}_proj.weight")])
    converted["conv1d.weight"] = torch.cat([state[name] for name in _three("{}_conv1d.weight")])
    return converted


def qwen3_5_to_gated_deltanet(state: State) -> dict[str, torch.Tensor]:
    """State of a `Qwen3_5GatedDeltaNet` -> state of a `GatedDeltaNet`.

    Raises:
        ValueError: a tensor is missing or unknown.
    """
    expected = {*QWEN3_5_NAMES.values(), "in_proj_qkv.weight", "conv1d.weight"}
    _check_names(state, expected, "Qwen3_5GatedDeltaNet")
    converted = {ours: state[theirs] for ours, theirs in QWEN3_5_NAMES.items()}
    value_dim = state["out_proj.weight"].shape[1]
    key_dim = (state["conv1d.weight"].shape[0] - value_dim) // 2
    sizes = [key_dim, key_dim, value_dim]
    converted.update(zip(_three("{}_proj.weight"), state["in_proj_qkv.weight"].split(sizes), strict=True))
    converted.update(zip(_three("{}_conv1d.weight"), state["conv1d.weight"].split(sizes), strict=True))
    return converted


def kimi_delta_attention_to_kimi_linear(state: State) -> dict[str, torch.Tensor]:
    """State of a `KimiDeltaAttention` -> state of a `KimiLinearDeltaAttention`.

    Raises:
        ValueError: `g_proj.1.bias` is not zero, the layer has a tensor that Kimi-Linear has no place for, or lacks one.
    """
    expected = {*KIMI_LINEAR_NAMES, "A_log", "g_proj.1.bias", *_three("{}_conv1d.weight")}
    _check_names(state, expected, "KimiDeltaAttention")
    if state["g_proj.1.bias"].count_nonzero():
        raise ValueError(
            "KimiDeltaAttention cannot be converted: g_proj.1.bias is not zero and Kimi-Linear's output gate has no "
            "bias. Train with that bias frozen at zero."
        )
    converted = {theirs: state[ours] for ours, theirs in KIMI_LINEAR_NAMES.items()}
    converted["forget_gate.A_log"] = state["A_log"].view(1, 1, -1, 1)
    converted["conv1d.weight"] = torch.cat([state[name] for name in _three("{}_conv1d.weight")])
    return converted


def kimi_linear_to_kimi_delta_attention(state: State) -> dict[str, torch.Tensor]:
    """State of a `KimiLinearDeltaAttention` -> state of a `KimiDeltaAttention`, with a zero `g_proj.1.bias`.

    Raises:
        ValueError: a tensor is missing or unknown.
    """
    expected = {*KIMI_LINEAR_NAMES.values(), "forget_gate.A_log", "conv1d.weight"}
    _check_names(state, expected, "KimiLinearDeltaAttention")
    converted = {ours: state[theirs] for ours, theirs in KIMI_LINEAR_NAMES.items()}
    converted["A_log"] = state["forget_gate.A_log"].flatten()
    converted["g_proj.1.bias"] = state["g_b_proj.weight"].new_zeros(state["g_b_proj.weight"].shape[0])
    converted.update(zip(_three("{}_conv1d.weight"), state["conv1d.weight"].chunk(3), strict=True))
    return converted


def _three(pattern: str) -> list[str]:
    return [pattern.format(name) for name in "qkv"]


def _check_names(state: State, expected: set[str], layer: str) -> None:
    if missing := sorted(expected - state.keys()):
        raise ValueError(f"not the state of a convertible {layer}: missing {', '.join(missing)}")
    if unknown := sorted(state.keys() - expected):
        raise ValueError(f"not the state of a convertible {layer}: no counterpart for {', '.join(unknown)}")
