"""What FLA's ops are made of and other code imports, under the same paths: against definitions in float64."""

import importlib

import pytest
import torch

from fla_npu.errors import ShapeError
from fla_npu.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd
from tests.ops import calls


@pytest.mark.parametrize("gate", ["none", "softplus", "softplus without bias"])
@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 40]])
def test_recurrent_gdn_forward(gate: str, bounds: list[int] | None):
    """The gate is on if `A_log` is given; the rest is the public op, without its graph."""
    call = calls.make_call(
        "fused_recurrent_gdn", T=20, bounds=bounds, gate=gate, beta="negative", l2norm=True, v_first=True
    )
    want_o, want_state = calls.expected("fused_recurrent_gdn", call)
    call.pop("use_gate_in_kernel", None)
    call["q"].requires_grad_()
    o, state = fused_recurrent_gated_delta_rule_fwd(**call)
    assert not o.requires_grad and state is not None and state.dtype == torch.float32
    calls.assert_accurate("o", o, want_o)
    calls.assert_accurate("state", state, want_state)


def test_recurrent_gdn_forward_in_the_order_of_fla():
    call = calls.make_call("fused_recurrent_gdn", T=5)
    names = ("q", "k", "v", "g", "gk", "gv", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state")
    o, state = fused_recurrent_gated_delta_rule_fwd(*(call.get(name) for name in names))
    calls.assert_accurate("o", o, calls.expected("fused_recurrent_gdn", call)[0])
    assert state is not None
    assert fused_recurrent_gated_delta_rule_fwd(*(call.get(name) for name in names[:11]))[1] is None
    with pytest.raises(ShapeError, match="g must have shape"):
        fused_recurrent_gated_delta_rule_fwd(**{**call, "g": call["g"][..., :1]})


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("gated_delta_rule.wy_fast", "recompute_w_u_fwd"),
        ("gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_intra"),
        ("kda.chunk_fwd", "chunk_kda_fwd"),
        ("kda.chunk_bwd", "chunk_kda_bwd"),
        ("kda.chunk_intra", "chunk_kda_fwd_intra"),
        ("kda.wy_fast", "recompute_w_u_fwd"),
    ],
)
def test_steps_between_kernels(module: str, name: str):
    """The modules exist, and tell a caller of their functions what is there in place of them."""
    found = importlib.import_module(f"fla_npu.ops.{module}")
    assert not hasattr(found, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': FLA has steps .* Use fla_npu.ops") as raised:
        getattr(found, name)
    package, op = str(raised.value).split()[-1].rsplit(".", 1)
    assert callable(getattr(importlib.import_module(package), op))
    with pytest.raises(ImportError, match=f"cannot import name '{name}'"):
        exec(f"from fla_npu.ops.{module} import {name}")
