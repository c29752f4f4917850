"""FLA 0.6.0's names and signatures, hard-coded; and that importing the package is cheap and pulls nothing in."""

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

import fla_npu

REQUIRED = inspect.Parameter.empty

CHUNK_GDN = {
    **dict.fromkeys(["q", "k", "v", "g", "beta"], REQUIRED),
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "state_v_first": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "chunk_indices": None,
    "cp_context": None,
}
RECURRENT_GDN = {
    **dict.fromkeys(["q", "k", "v"], REQUIRED),
    **dict.fromkeys(["g", "gk", "gv", "beta", "scale", "initial_state"]),
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "A_log": None,
    "dt_bias": None,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "state_v_first": False,
    "cu_seqlens": None,
}
CHUNK_KDA = {
    **dict.fromkeys(["q", "k", "v", "g", "beta"], REQUIRED),
    "scale": None,
    "initial_state": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "safe_gate": False,
    "lower_bound": None,
    "disable_recompute": False,
    "return_intermediate_states": False,
    "state_v_first": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "cp_context": None,
    "use_graph": False,
    "max_num_seqs": None,
}
RECURRENT_KDA = {
    **dict.fromkeys(["q", "k", "v", "g", "beta"], REQUIRED),
    **dict.fromkeys(["A_log", "dt_bias", "scale", "initial_state"]),
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "lower_bound": None,
    "state_v_first": False,
    "cu_seqlens": None,
}
RECURRENT_KDA_FWD = {
    **dict.fromkeys(["q", "k", "v", "g", "beta"], REQUIRED),
    **dict.fromkeys(["A_log", "dt_bias", "initial_state", "scale"]),
    "output_final_state": False,
    "inplace_final_state": True,
    "state_v_first": False,
    "cu_seqlens": None,
    "ssm_state_indices": None,
    "num_accepted_tokens": None,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "lower_bound": None,
    "out": None,
}
_QKV = dict.fromkeys(["q", "k", "v"], REQUIRED)
_TAIL = {"scale": None, "initial_state": None, "output_final_state": False}
_GDN2 = dict.fromkeys(["q", "k", "v", "g", "b", "w"], REQUIRED)
CHUNK_GDN2 = {
    **_GDN2,
    **_TAIL,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "safe_gate": False,
    "lower_bound": None,
    "disable_recompute": False,
    "return_intermediate_states": False,
    "state_v_first": False,
    "cp_context": None,
}
RECURRENT_GDN2 = {
    **_GDN2,
    "A_log": None,
    "dt_bias": None,
    **_TAIL,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "lower_bound": None,
    "state_v_first": False,
    "cu_seqlens": None,
}
CHUNK_DELTA_PRODUCT = {
    **dict.fromkeys(["q", "k", "v", "g", "beta", "num_householder"], REQUIRED),
    **_TAIL,
    "use_qk_l2norm_in_kernel": False,
    "cu_seqlens": None,
    "cu_seqlens_cpu": None,
    "cp_context": None,
}

# Module, name, positional parameters with their defaults, and names that may also be given by keyword.
SIGNATURES: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    (
        "ops.gated_delta_rule.chunk",
        "chunk_gated_delta_rule",
        CHUNK_GDN,
        ("use_gate_in_kernel", "A_log", "dt_bias", "chunk_size"),
    ),
    ("ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule", RECURRENT_GDN, ()),
    ("ops.kda.chunk", "chunk_kda", CHUNK_KDA, ("A_log", "dt_bias", "chunk_size", "cu_seq_lens_q")),
    ("ops.kda.fused_recurrent", "fused_recurrent_kda", RECURRENT_KDA, ("cu_seq_lens_q",)),
    ("ops.kda.fused_recurrent", "fused_recurrent_kda_fwd", RECURRENT_KDA_FWD, ()),
    (
        "ops.gated_delta_rule.naive",
        "naive_recurrent_gated_delta_rule",
        {**_QKV, "beta": REQUIRED, "g": REQUIRED, **_TAIL},
        (),
    ),
    (
        "ops.gated_delta_rule.naive",
        "naive_chunk_gated_delta_rule",
        {**_QKV, "g": REQUIRED, "beta": REQUIRED, "chunk_size": 64, **_TAIL},
        (),
    ),
    ("ops.kda.naive", "naive_recurrent_kda", {**_QKV, "g": REQUIRED, "beta": REQUIRED, **_TAIL}, ()),
    ("ops.kda.naive", "naive_chunk_kda", {**_QKV, "g": REQUIRED, "beta": REQUIRED, **_TAIL, "chunk_size": 64}, ()),
    ("ops.gdn2.chunk", "chunk_gdn2", CHUNK_GDN2, ("A_log", "dt_bias", "chunk_size")),
    ("ops.gdn2.fused_recurrent", "fused_recurrent_gdn2", RECURRENT_GDN2, ()),
    ("ops.gdn2.naive", "naive_recurrent_gdn2", {**_GDN2, **_TAIL}, ()),
    ("ops.gdn2.naive", "naive_chunk_gdn2", {**_GDN2, **_TAIL, "chunk_size": 64}, ()),
    ("ops.gated_delta_product.chunk", "chunk_gated_delta_product", CHUNK_DELTA_PRODUCT, ()),
    (
        "ops.gated_delta_product.naive",
        "naive_recurrent_gated_delta_product",
        {
            **dict.fromkeys(["q", "k", "v", "g", "beta", "scale"], REQUIRED),
            "cu_seqlens": None,
            "initial_state": None,
            "output_final_state": False,
            "num_householder": 1,
        },
        (),
    ),
]


@pytest.mark.parametrize(("module", "name", "positional", "keywords"), SIGNATURES, ids=lambda x: x if x else "")
def test_signature(module: str, name: str, positional: dict[str, Any], keywords: tuple[str, ...]):
    function = getattr(importlib.import_module(f"fla_npu.{module}"), name)
    parameters = inspect.signature(function).parameters
    got = {key: p.default for key, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert list(got.items()) == list(positional.items())
    named = {key for key, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert set(keywords) <= named


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "ops",
            "chunk_gated_delta_rule chunk_gdn fused_recurrent_gated_delta_rule fused_recurrent_gdn "
            "chunk_kda fused_recurrent_kda",
        ),
        (
            "ops.gated_delta_rule",
            "chunk_gated_delta_rule chunk_gdn fused_recurrent_gated_delta_rule fused_recurrent_gdn "
            "naive_chunk_gated_delta_rule naive_recurrent_gated_delta_rule recurrent_gated_delta_rule",
        ),
        ("ops.kda", "chunk_kda fused_recurrent_kda"),
        ("ops.gdn2", "chunk_gdn2 fused_recurrent_gdn2 naive_chunk_gdn2 naive_recurrent_gdn2"),
        ("ops.gated_delta_product", "chunk_gated_delta_product"),
        (
            "ops.gated_delta_rule.gate",
            "naive_gdn_gate fused_gdn_gate gdn_gate_fwd gdn_gate_bwd gdn_gate_chunk_cumsum",
        ),
        (
            "ops.kda.gate",
            "naive_kda_gate naive_kda_lowerbound_gate fused_kda_gate kda_gate_fwd kda_gate_bwd kda_gate_chunk_cumsum",
        ),
        ("ops.common.gate", "fused_beta_sigmoid fused_beta_sigmoid_fwd fused_beta_sigmoid_bwd"),
    ],
)
def test_names(module: str, names: str):
    loaded = importlib.import_module(f"fla_npu.{module}")
    for name in names.split():
        assert callable(getattr(loaded, name)), name
    if hasattr(loaded, "__all__"):
        assert set(loaded.__all__) <= set(dir(loaded))


def test_second_names_are_the_same_objects():
    assert fla_npu.chunk_gdn is fla_npu.chunk_gated_delta_rule
    assert fla_npu.fused_recurrent_gdn is fla_npu.fused_recurrent_gated_delta_rule
    assert fla_npu.recurrent_gated_delta_rule is fla_npu.fused_recurrent_gated_delta_rule
    assert all(hasattr(fla_npu, name) for name in fla_npu.__all__)


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_pulls_nothing_in():
    """Only torch and what it needs; no accelerator is looked for."""
    code = (
        "import sys, fla_npu, fla_npu.ops.kda.fused_recurrent, fla_npu.ops.dispatch, fla_npu.utils\n"
        "print(*[name for name in ('triton', 'transformers', 'torch_npu', 'fla', 'numba', 'matplotlib') "
        "if name in sys.modules])"
    )
    assert python(code).split() == []


def test_import_needs_little_work():
    """Beyond torch. Compiling a kernel, reading a table or asking a device at import would be many times as much."""
    code = "import torch; from tests.work import calls; print(calls(__import__, 'fla_npu'))"
    # 53 thousand calls of functions, a tenth of a second.
    assert int(python(code)) < 80_000
