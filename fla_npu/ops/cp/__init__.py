"""Context parallelism, sequences split over processes, which no op here supports.

What is here lets code import and build what it hands to the ops when it runs in one process, and exchange tensors with
neighbours. An op that is given a context raises a NotImplementedError.
"""

from fla_npu.ops.cp.comm import (
    all_gather_into_tensor,
    all_reduce_sum,
    conv_cp_send_recv_bwd,
    conv_cp_send_recv_fwd,
    send_recv_bwd,
    send_recv_fwd,
)
from fla_npu.ops.cp.context import FLACPContext, build_cp_context

__all__ = [
    "FLACPContext",
    "all_gather_into_tensor",
    "all_reduce_sum",
    "build_cp_context",
    "conv_cp_send_recv_bwd",
    "conv_cp_send_recv_fwd",
    "send_recv_bwd",
    "send_recv_fwd",
]
