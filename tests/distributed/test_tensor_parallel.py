"""Tensor parallelism of two processes against one, forward, backward, decoding and checkpoints."""

from pathlib import Path

import pytest
import torch

from fla_npu.testing import rms_ratio
from tests.distributed import cases
from tests.distributed.processes import WORLD, run_cases
from tests.ops.calls import CHUNKED, OPS, Arguments, make_call

HEAD_AXIS = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "initial_state": 1, "A_log": 0, "dt_bias": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_the_op_of_a_device_gives_the_same_bits(op: str, dtype: torch.dtype):
    """Its outputs and state are those of its heads in a call with all of them. So are gradients, but for the last bit:
    the elementwise functions of their many shapes are scalar at the ends of arrays and vectorised elsewhere."""

    def results(call: Arguments) -> dict[str, torch.Tensor]:
        call = {name: x.clone().requires_grad_() if name in HEAD_AXIS else x for name, x in call.items()}
        o, state, *_ = OPS[op](**call)
        found = {"o": o, "state": state}
        if op in CHUNKED:
            (o.double().sum() + state.double().square().sum()).backward()
            found.update({name: call[name].grad for name in HEAD_AXIS if name in call})
        return found

    call = make_call(op, B=2, T=100, H=4, HV=8, K=32, V=24, dtype=dtype, gate="softplus", beta="sigmoid", l2norm=True)
    whole = results(call)
    for rank in range(WORLD):

        def part(name: str, x: torch.Tensor, rank: int = rank) -> torch.Tensor:
            return x.chunk(WORLD, dim={"o": 2, "state": 1, **HEAD_AXIS}[name])[rank]

        mine = results({name: part(name, x) if name in HEAD_AXIS else x for name, x in call.items()})
        assert mine.keys() == whole.keys()
        for name, x in mine.items():
            expected = part(name, whole[name])
            same = rms_ratio(x, expected) <= torch.finfo(dtype).eps if name in call else torch.equal(x, expected)
            assert same, name


def test_two_processes_are_one(tmp_path: Path):
    """One test, since under pytest-xdist every worker would start its own processes."""
    names = [case.__name__ for case in cases.CASES]
    reports = run_cases(cases.__name__, names, tmp_path, timeout=300)
    assert not reports, "\n".join(reports)
