"""FLA's fields, defaults and checks."""

import inspect

import pytest
from transformers import AutoConfig

from fla_npu.models import (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    GatedDeltaProductConfig,
    GLAConfig,
    KDAConfig,
    RetNetConfig,
)
from fla_npu.models.configuration_utils import get_attention_spec

SHARED = {
    "attn_mode": "chunk",
    "hidden_size": 2048,
    "conv_size": 4,
    "max_position_embeddings": 2048,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "attn": None,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "fuse_cross_entropy": True,
    "use_l2warp": False,
    "vocab_size": 32000,
    "attnres_block_size": None,
}
DELTA = {"use_short_conv": True, "allow_neg_eigval": False}
GROUPED = {
    "num_kv_heads": None,
    "feature_map": None,
    "use_short_conv": False,
    "use_output_gate": True,
    "elementwise_affine": True,
    "num_hidden_layers": 24,
    "fuse_linear_cross_entropy": False,
}
OWN = {
    DeltaNetConfig: DELTA
    | {
        "num_heads": 16,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "num_hidden_layers": 24,
        "use_gate": False,
        "use_beta": True,
        "use_output_norm": True,
        "qk_norm": "l2",
        "qk_activation": "silu",
        "fuse_linear_cross_entropy": False,
    },
    GatedDeltaNetConfig: DELTA
    | {
        "head_dim": 256,
        "num_heads": 6,
        "num_v_heads": None,
        "expand_v": 2.0,
        "num_hidden_layers": 21,
        "use_gate": True,
        "output_gate_activation": "swish",
        "fuse_linear_cross_entropy": False,
    },
    GatedDeltaProductConfig: DELTA
    | {
        "head_dim": 256,
        "num_heads": 6,
        "expand_v": 2.0,
        "num_hidden_layers": 21,
        "use_output_gate": True,
        "use_forget_gate": False,
        "num_householder": 1,
        "fuse_linear_cross_entropy": False,
    },
    GLAConfig: GROUPED
    | {
        "num_heads": 4,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "clamp_min": None,
        "use_gk": True,
        "use_gv": False,
    },
    RetNetConfig: GROUPED | {"num_heads": 8, "expand_k": 1.0, "expand_v": 2.0, "hidden_ratio": 2},
    KDAConfig: DELTA
    | {
        "head_dim": 128,
        "num_heads": 16,
        "num_v_heads": None,
        "expand_v": 1.0,
        "num_hidden_layers": 24,
        "safe_gate": False,
        "lower_bound": None,
    },
}

TYPES = {
    DeltaNetConfig: "delta_net",
    GatedDeltaNetConfig: "gated_deltanet",
    GatedDeltaProductConfig: "gated_deltaproduct",
    GLAConfig: "gla",
    KDAConfig: "kda",
    RetNetConfig: "retnet",
}


@pytest.mark.parametrize("family", OWN)
def test_fields_and_defaults(family):
    parameters = inspect.signature(family.__init__).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert defaults == {**SHARED, **OWN[family]}
    fields = family().to_dict()
    assert {name: fields[name] for name in defaults} == defaults
    assert family.model_type == TYPES[family]


@pytest.mark.parametrize("family", OWN)
def test_round_trip(family, tmp_path):
    config = family(attn=[{"layers": (3, 1), "num_heads": 4}, {"layers": [2], "num_heads": 2, "window_size": 7}])
    config.save_pretrained(tmp_path)
    for loaded in (family.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is family and loaded.attn == config.attn
        assert {k: v for k, v in loaded.to_dict().items() if k != "_name_or_path"} == {
            k: v for k, v in config.to_dict().items() if k != "_name_or_path"
        }


def test_attention_specifications():
    given = {"layers": (0, 2), "num_heads": 4, "extra": 1}
    config = KDAConfig(attn=given)
    assert config.attn == {
        "layers": [0, 2],
        "num_heads": 4,
        "num_kv_heads": 4,
        "qkv_bias": False,
        "window_size": None,
        "rope_theta": 10000.0,
        "extra": 1,
    }
    assert given == {"layers": (0, 2), "num_heads": 4, "extra": 1}
    assert get_attention_spec(config.attn, layer_idx=2) is config.attn
    assert get_attention_spec(config.attn, layer_idx=1) is get_attention_spec(None, layer_idx=0) is None


@pytest.mark.parametrize(
    ("attn", "message"),
    [
        ("all", "attn must be None, a dictionary, or a list"),
        (["all"], "an attn specification must be a dictionary; got 'all'"),
        ({"num_heads": 4}, "attn field 'layers' must be a list of integer layer indices; got '<missing>'"),
        ({"layers": [0.5], "num_heads": 4}, "attn field 'layers' must be a list of integer"),
        ({"layers": [24], "num_heads": 4}, r"attn field 'layers' must be in \[0, 24\); got \[24\]"),
        ({"layers": [0]}, "attn field 'num_heads' must be a positive integer; got '<missing>'"),
        ({"layers": [0], "num_heads": 4, "num_kv_heads": 0}, "'num_kv_heads' must be a positive integer; got 0"),
        ({"layers": [0], "num_heads": 4, "qkv_bias": 1}, "'qkv_bias' must be a bool; got 1"),
        ({"layers": [0], "num_heads": 4, "window_size": -1}, "'window_size' must be a positive integer or None"),
        ({"layers": [0], "num_heads": 4, "rope_theta": float("inf")}, "'rope_theta' must be positive and finite"),
        ({"layers": [0, 0], "num_heads": 4}, "attn assigns layer 0 twice"),
        ([{"layers": [1], "num_heads": 4}, {"layers": [1], "num_heads": 2}], "attn assigns layer 1 twice"),
    ],
)
def test_bad_attention(attn, message):
    with pytest.raises(ValueError, match=message):
        KDAConfig(attn=attn)
    config = KDAConfig()
    with pytest.raises(ValueError, match=message):
        config.attn = attn


def test_contradictions():
    with pytest.raises(ValueError, match="cannot both be True"):
        GatedDeltaNetConfig(fuse_linear_cross_entropy=True)
    with pytest.warns(UserWarning, match="rounded once more") as warned:
        GatedDeltaNetConfig(fuse_linear_cross_entropy=True, fuse_cross_entropy=False)
    assert warned[0].filename == __file__
    with pytest.raises(ValueError, match="output_gate_activation must be 'swish', 'silu', or 'sigmoid', got 'tanh'"):
        GatedDeltaNetConfig(output_gate_activation="tanh")
    with pytest.raises(ValueError, match="safe_gate=True requires a lower_bound"):
        KDAConfig(safe_gate=True)
    for size in (3, 0):
        with pytest.raises(ValueError, match=f"must be None, 1 or an even number, got {size}"):
            KDAConfig(attnres_block_size=size)
    with pytest.warns(UserWarning, match="RetNet models have no short convolutions") as warned:
        RetNetConfig(use_short_conv=True)
    assert warned[0].filename == __file__
