"""The third tier: calls in segments are the calls, and are cut only where the schedule gains by it."""

import pytest
import torch

from fla_npu.ops.common import segments
from fla_npu.ops.common.configs import Config
from fla_npu.ops.common.segments import launch_balanced, launch_segments
from fla_npu.planner.kernels import SHORTEST
from tests.kernels.calls import definition, limits, make_call

CONFIG = Config(chunk=16, width=32)


@pytest.mark.parametrize("channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize(
    ("options", "cut"),
    [
        ({"T": 70, "K": 48, "V": 20}, ((32, 38),)),
        ({"T": 64, "B": 2, "v_first": True, "dtype": torch.float16}, ((16, 16, 32), (48, 16))),
        ({"lengths": [0, 40, 1], "initial": False}, ((), (16, 24), (1,))),
        ({"lengths": [33, 0], "l2norm": True, "gate": "softplus", "beta": "logits"}, ((16, 16, 1), ())),
        ({"T": 40, "final": False}, ((16, 24),)),
    ],
)
def test_results_are_those_of_the_call(options, cut, channel):
    call = make_call(channel=channel, H=1, HV=2, seed=1, **options)
    o, final = launch_segments(call.tensors, call.options, CONFIG, cut, cores=3)
    wanted = definition(call)
    rows, states = limits(call, wanted, CONFIG, False)
    # The three launches are off by their bound each; the map of a segment, a contraction, does not enlarge that.
    assert o.shape == wanted.o.shape and o.dtype == call.tensors.v.dtype
    assert ((o.double() - wanted.o).norm(dim=3) <= 3 * rows).all()
    assert (final is None) == (not call.options.output_final_state)
    if final is not None:
        assert ((final.double() - wanted.final).flatten(2).norm(dim=2) <= 3 * states).all()


def test_few_heads_of_a_long_sequence_are_cut_and_others_are_not(monkeypatch):
    taken = []
    monkeypatch.setattr(segments, "launch_segments", lambda *args, **kwargs: taken.append(args[3]))
    monkeypatch.setattr(segments, "launch_chunks", lambda *args, **kwargs: taken.append(None))
    for T, HV, cores in ((4096, 1, 20), (4096, 16, 20), (512, 1, 20), (4096, 1, 2)):
        tensors = make_call(T=T, H=1, HV=HV, K=16, V=16).tensors
        launch_balanced(tensors, make_call().options, CONFIG, cores=cores)
    cut, *others = taken
    assert sum(cut[0]) == 4096 and len(cut[0]) == 4096 // 16 // SHORTEST
    assert all(length % 16 == 0 for length in cut[0])
    assert others == [None, None, None]


def test_unread_lengths_are_left_alone(monkeypatch):
    taken = []
    monkeypatch.setattr(segments, "launch_chunks", lambda *args, **kwargs: taken.append(None))
    call = make_call(lengths=[4096], H=1, HV=1, K=16, V=16)
    launch_balanced(call.tensors, call.options, CONFIG, cu_seqlens=torch.tensor([0, 4096]), cores=20)
    assert taken == [None]
