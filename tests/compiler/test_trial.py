"""Whole calls in the simulator: right ones pass, and a wrong result is seen."""

import pytest
import torch

from fla_npu.ops.common import gate_kernel, launch
from fla_npu.ops.common.configs import Config
from fla_npu.ops.common.trial import Simulation, bounds, expected, judge, make_call


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLA_NPU_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = Simulation()
        yield made
        made.close()


@pytest.mark.parametrize("op", ["chunk_gdn", "chunk_kda"])
def test_a_small_configuration_runs_right(simulation, op):
    before = launch.delta_rule_kernel
    trial = simulation.trial(op, Config(chunk=16, width=32), K=32, V=32)
    assert trial.right and trial.state < 1e-12, trial
    assert launch.delta_rule_kernel is before and all(
        not isinstance(value, type(simulation._kernels[0])) for value in vars(gate_kernel).values()
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("op", ["chunk_gdn", "chunk_kda"])
def test_wrong_results_are_seen(op, fast, dtype):
    tensors, options = make_call(op, K=16, V=16, dtype=dtype, tokens=40)
    o, state = expected(tensors, options)
    rounded = o.to(tensors.v.dtype)
    assert judge((rounded, state.float()), (o, state), dtype, fast).right
    last = rounded.clone()
    last[:, -1] = 0
    for broken in ((last, state), (rounded, state * 0.97), (rounded * torch.nan, state), (rounded, state.roll(1, 3))):
        assert not judge(broken, (o, state), dtype, fast).right


def test_bounds_are_ordered():
    for dtype in ("fp16", "bf16"):
        assert all(exact <= fast for exact, fast in zip(bounds(dtype, False), bounds(dtype, True), strict=True))
    assert bounds("fp16", False)[0] < bounds("bf16", False)[0]
