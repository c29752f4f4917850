"""The context of one process, the exchange with neighbours, and that the ops refuse contexts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fla_npu.modules.causal_conv1d import causal_conv1d
from fla_npu.ops import chunk_gated_delta_rule, chunk_kda
from fla_npu.ops.cp import FLACPContext, build_cp_context, comm
from tests.ops import calls


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("with_group", [False, True])
def test_context_of_one_process(group: Any, with_group: bool, layout: str):
    bounds = torch.tensor([0, 0, 3, 3, 8])
    context = build_cp_context(bounds, group if with_group else None, 4, bounds.clone(), layout=layout)
    assert context.cu_seqlens.tolist() == context.cu_seqlens_cpu.tolist() == [0, 3, 8] and context.num_seqs == 2
    assert context.cu_seqlens.dtype == torch.int32 and context.is_cp_enabled is with_group
    assert context.is_first_rank and context.is_last_rank and context.conv1d_kernel_size == 4
    assert context.pre_num_ranks == context.post_num_ranks == context.pre_num_conv_tokens == 0
    copy = context.copy_for_backward()
    copy.cu_seqlens.zero_()
    copy.cu_seqlens_cpu.zero_()
    assert context.cu_seqlens[-1] == context.cu_seqlens_cpu[-1] == 8 and copy.group is context.group


def test_context_without_anything():
    context = FLACPContext()
    assert context.num_seqs == 0 and not context.is_cp_enabled and context.copy_for_backward().cu_seqlens is None


def test_context_refuses(monkeypatch: pytest.MonkeyPatch):
    bounds = torch.tensor([0, 3])
    for change, error, message in (
        ({"other": 1}, TypeError, r"no arguments \['other'\]"),
        ({"layout": "spiral"}, ValueError, "layout must be one of .*, got 'spiral'"),
        ({"use_tf32x3_affine_chain": False}, ValueError, "use_tf32x3_affine_chain"),
        ({"cu_seqlens": torch.tensor([1, 3])}, ValueError, "start at 0"),
        ({"cu_seqlens": torch.tensor([0, 0])}, ValueError, "at least one token"),
    ):
        with pytest.raises(error, match=message):
            build_cp_context(**{"cu_seqlens": bounds, "group": None, **change})
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    with pytest.raises(NotImplementedError, match="group has 4 processes"):
        build_cp_context(bounds, SimpleNamespace())


def test_ops_refuse_a_context():
    context = build_cp_context(torch.tensor([0, 5]), None)
    for op, name in ((chunk_gated_delta_rule, "chunk_gdn"), (chunk_kda, "chunk_kda")):
        with pytest.raises(NotImplementedError, match="cp_context"):
            op(**calls.make_call(name, T=5), cp_context=context)
    with pytest.raises(NotImplementedError, match="cp_context"):
        causal_conv1d(torch.zeros(1, 5, 2), torch.zeros(2, 3), cp_context=context)


def test_exchange_of_one_process(group: Any):
    x = torch.randn(3, 2).T
    gathered, handle = comm.all_gather_into_tensor(x, group=group)
    assert torch.equal(gathered, x[None]) and handle is None
    out = torch.zeros(1, 2, 3)
    _, handle = comm.all_gather_into_tensor(x, out, group, async_op=True)
    handle.wait()
    assert torch.equal(out[0], x)
    y = x.contiguous()
    total, handle = comm.all_reduce_sum(y, group)
    assert total is y and torch.equal(y, x) and handle is None
    for exchange in (comm.send_recv_fwd, comm.send_recv_bwd, comm.conv_cp_send_recv_fwd, comm.conv_cp_send_recv_bwd):
        assert torch.equal(exchange(x, group), torch.zeros(2, 3))


@pytest.mark.parametrize("rank", range(3))
def test_neighbours(rank: int, monkeypatch: pytest.MonkeyPatch):
    """What each of three processes gets, if process n sends n + 1."""
    sent = torch.arange(1.0, 4.0).view(3, 1)
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(comm, "all_gather_into_tensor", lambda x, group: (sent, None))
    before, after = [0.0, 1.0, 2.0][rank], [2.0, 3.0, 0.0][rank]
    assert comm.send_recv_fwd(sent[rank], None).item() == comm.conv_cp_send_recv_fwd(sent[rank], None).item() == before
    assert comm.send_recv_fwd(sent[rank], None, recv_from_prev=False).item() == after
    assert comm.send_recv_bwd(sent[rank], None).item() == comm.conv_cp_send_recv_bwd(sent[rank], None).item() == after
    assert comm.send_recv_bwd(sent[rank], None, recv_from_next=False).item() == before
