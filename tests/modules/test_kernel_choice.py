"""Which calls of the modules are left to the kernels; on an NPU, or on what says it is one."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fla_npu.modules import RMSNorm, ShortConvolution
from fla_npu.modules.kernels import launch
from fla_npu.ops.dispatch import use_implementation
from tests.npu import forget_choices, pretend_npus, pretend_triton


@pytest.fixture
def npu(monkeypatch, tmp_path):
    """Pretends that there is triton-ascend, and an NPU of the name that the result is called with."""
    pretend_triton(monkeypatch, tmp_path)
    yield partial(pretend_npus, monkeypatch)
    forget_choices()


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("Ascend910B3", True),
        ("Ascend910_9382", True),
        ("Ascend310P3", False),
        ("Ascend310B1", False),
        ("Ascend9999", False),
    ],
)
def test_chips(npu, name, runs):
    npu(name)
    assert launch.runs_kernels(SimpleNamespace(type="npu", index=0)) is runs


def test_without_triton(npu, monkeypatch):
    npu("Ascend910B3")
    pretend_triton(monkeypatch, None)
    assert not launch.runs_kernels(SimpleNamespace(type="npu", index=None))


def test_a_cpu_runs_none(npu):
    npu("Ascend910B3")
    assert not launch.runs_kernels(torch.device("cpu"))


def test_calls_with_gradients_and_float64_are_portable(monkeypatch):
    monkeypatch.setattr(launch, "runs_kernels", lambda device: True)
    x = torch.randn(1, 5, 8)
    norm, conv = RMSNorm(8), ShortConvolution(8, 4)
    # Were a kernel taken here, its import would fail, or its launch, for there is no device.
    norm(x).sum().backward()
    conv(x)[0].sum().backward()
    assert norm.weight.grad is not None and conv.weight.grad is not None
    with torch.no_grad():
        RMSNorm(8, dtype=torch.float64)(x.double())
        assert launch.takes(x, norm.weight)


def test_the_implementation_asked_for_counts_here_too(npu):
    npu("Ascend910B3")
    device = SimpleNamespace(type="npu", index=0)
    assert launch.runs_kernels(device)
    with use_implementation("eager"):
        assert not launch.runs_kernels(device)
    with use_implementation("triton"):
        assert launch.runs_kernels(device)
