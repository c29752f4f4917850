"""FLA's import paths lead to the same objects, and importing them loads nothing optional."""

import importlib
import subprocess
import sys

import pytest

CONV_PATHS = ("convolution", "conv", "causal_conv1d", "conv.short_conv", "conv.causal_conv1d", "conv.triton.ops")
LONG_CONV = ("ImplicitLongConvolution", "LongConvolution", "PositionalEmbedding", "fft_conv")
CONV = ("ShortConvolution", "causal_conv1d", "causal_conv1d_update", "causal_conv1d_update_states")


@pytest.mark.parametrize(
    ("path", "target", "names"),
    [
        *((path, "causal_conv1d.ops", CONV) for path in CONV_PATHS),
        *((path, "long_conv", LONG_CONV) for path in ("convolution", "conv", "conv.long_conv")),
        ("l2norm", "norm.l2norm", ("L2Norm", "l2_norm", "l2norm", "l2norm_bwd", "l2norm_fwd")),
        ("layernorm", "norm.layernorm", ("RMSNorm", "rms_norm")),
        ("layernorm_gated", "norm.layernorm_gated", ("RMSNormGated",)),
        ("fused_norm_gate", "norm.fused_norm_gate", ("FusedRMSNormGated", "FusedRMSNormSwishGate", "rms_norm_gated")),
    ],
)
def test_alias(path, target, names):
    alias = importlib.import_module(f"fla_npu.modules.{path}")
    module = importlib.import_module(f"fla_npu.modules.{target}")
    for name in names:
        assert getattr(alias, name) is getattr(module, name)


def test_the_function_is_not_hidden_by_the_module_of_its_name():
    importlib.import_module("fla_npu.modules.conv.causal_conv1d")
    from fla_npu.modules.conv import causal_conv1d

    assert callable(causal_conv1d)


def test_importing_loads_nothing_optional():
    code = (
        "import sys, fla_npu.modules, fla_npu.modules.convolution, fla_npu.layers\n"
        "sys.exit(str([m for m in ('transformers', 'triton', 'torch_npu') if m in sys.modules] or ''))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""
