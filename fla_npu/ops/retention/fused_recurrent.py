"""`fused_recurrent_retention`: retention for decoding and in reverse, with gradients."""

from typing import Any

import torch

from fla_npu.ops.checks import check_ranks
from fla_npu.ops.retention.decay import retention_decay
from fla_npu.ops.simple_gla.fused_recurrent import fused_recurrent_simple_gla


def fused_recurrent_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fused_recurrent_simple_gla` with the decays of `chunk_retention`. Arguments, results and errors are its own."""
    check_ranks(q, k, v)
    return fused_recurrent_simple_gla(
        q,
        k,
        v,
        g_gamma=retention_decay(v.shape[2], q),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        **kwargs,
    )
