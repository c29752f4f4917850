"""Launchers do what the plan says: its configuration, its schedule and its segments, and none of their own."""

import inspect
from typing import Any

import pytest
import torch

from fla_npu.ops.common import launch, segments
from fla_npu.ops.dispatch import use_implementation
from fla_npu.ops.kernels import INTERPRETED_CHIP, use_precision
from fla_npu.planner.chips import chip
from fla_npu.planner.kernels import KERNELS
from fla_npu.planner.plan import Plan, plan
from tests.ops.calls import make_call, run

CORES = chip(INTERPRETED_CHIP).aicores
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

CALLS: dict[str, dict[str, Any]] = {
    "equal": {"T": 70, "HV": 6},
    "more heads than cores": {"T": 30, "H": 1, "HV": CORES + 4, "dtype": torch.bfloat16},
    "batch": {"T": 20, "B": 3},
    "packed": {"bounds": [0, 33, 33, 163, 168]},
    "narrow": {"T": 40, "H": 1, "HV": 1, "K": 20, "V": 50, "dtype": torch.float16},
    "wide": {"T": 10, "V": 200},
}


class Unlaunched:
    """A kernel that keeps its arguments and does nothing."""

    def __init__(self, kernel: Any) -> None:
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **fixed: self.launches.append((grid, dict(zip(self.names, args, strict=False)) | fixed))


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> Unlaunched:
    """Instead of the chunk kernel, on a device with the cores of the chip."""
    kernel = Unlaunched(launch.delta_rule_kernel)
    monkeypatch.setattr(launch, "delta_rule_kernel", kernel)
    for module in (launch, segments):
        monkeypatch.setattr(module, "core_count", lambda device: CORES)
    return kernel


def planned(op: str, call: dict[str, Any], precision: str = "exact") -> Plan:
    """The plan of a call, from nothing but its shapes."""
    q, v = call["q"], call["v"]
    bounds = call.get("cu_seqlens")
    lengths = [v.shape[1]] * v.shape[0] if bounds is None else bounds.diff().tolist()
    return plan(
        KERNELS[op],
        INTERPRETED_CHIP,
        heads=v.shape[2],
        lengths=lengths,
        K=q.shape[3],
        V=v.shape[3],
        dtype=DTYPES[v.dtype],
        precision=precision,
        bounded=op == "chunk_gdn",
    )


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_a_call_is_launched_as_planned(op: str, case: str, precision: str, unlaunched: Unlaunched):
    call = make_call(op, **{"H": 2, "HV": 2, **CALLS[case]})
    with use_implementation("triton"), use_precision(precision):
        run(op, call)
    config, schedule, cut = planned(op, call, precision).to_kernel_config()
    assert cut is None
    [(grid, fixed)] = unlaunched.launches
    split = schedule.split
    assert grid == (schedule.cores,) == (CORES,)
    assert (fixed["C"], fixed["BV"], fixed["TILE"]) == (config.chunk, split.width, split.tile)
    assert (fixed["PARTS"], fixed["BLOCKS"], fixed["TABLE"]) == (split.parts, split.blocks, schedule.order is not None)
    assert (fixed["units"], fixed["whole"]) == (split.units, split.whole)
    tables = [None if fixed[name] is None else fixed[name].tolist() for name in ("bounds", "ids")]
    order = schedule.order
    assert tables == ([None, None] if order is None else [order.bounds.tolist(), order.ids.tolist()])


@pytest.mark.parametrize("op", KERNELS)
def test_a_long_sequence_of_one_head_is_cut_as_planned(op: str, unlaunched: Unlaunched):
    call = make_call(op, T=8192, H=1, HV=1)
    with use_implementation("triton"):
        run(op, call)
    _, _, cut = planned(op, call).to_kernel_config()
    assert cut is not None
    assert [fixed["units"] for _, fixed in unlaunched.launches] == [len(cut[0])] * 3
