"""Whole calls of the chunk ops as compiled for 910B3, in the simulator with its check for hazards, by the bounds that
the interpreter's tests derive. Two chunks and a tail of 22 rows."""

import pytest
import torch

from fla_npu.compiler.simulator.launcher import SimulatedKernel
from fla_npu.ops.common import gate_kernel, launch
from tests.kernels.calls import check, make_call

T = 2 * 64 + 22


@pytest.fixture(autouse=True)
def simulated(monkeypatch, tmp_path):
    monkeypatch.setenv("FLA_NPU_CACHE", str(tmp_path))
    kernels = []
    for module, name in (
        (launch, "delta_rule_kernel"), (gate_kernel, "gates_kernel"), (gate_kernel, "norms_kernel")
    ):  # fmt: skip
        kernels.append(SimulatedKernel.of(getattr(module, name)))
        monkeypatch.setattr(module, name, kernels[-1])
    yield kernels[0]
    for kernel in kernels:
        kernel.close()


def case(**changed):
    return make_call(**{"T": T, "HV": 1, "K": 128, "V": 128, "dtype": torch.bfloat16, **changed})


CASES = {
    "gdn": (case(gate="softplus"), False),
    "gdn fast": (case(gate="forgetful"), True),
    "gdn pack": (case(lengths=[40, 0, T - 40], HV=2, gate="softplus", l2norm=True, v_first=True), False),
    "kda bounded": (case(channel=True, gate="bounded"), False),
}


@pytest.mark.parametrize("name", CASES)
def test_runs_right(simulated, name):
    call, fast = CASES[name]
    check(call, fast=fast, cores=1)
    assert len(simulated.statistics) == 1


def test_mild_and_strong_chunks_by_turns(simulated):
    """Without a bound: the second chunk and nothing else decays more than what one reference per piece bears."""
    call = case(channel=True, gate="mild")
    assert call.tensors.g is not None
    call.tensors.g[:, 64:128] *= 200
    check(call, cores=1)
    strong = gate_kernel.launch_gates(*call.tensors[3:7], call.options, None, 64).strong
    assert strong.flatten().tolist() == [0, 1, 0]
