"""`chunk_retention`: retention over whole sequences, with gradients."""

from typing import Any

import torch

from fla_npu.ops.checks import check_ranks
from fla_npu.ops.retention.decay import retention_decay
from fla_npu.ops.simple_gla.chunk import chunk_simple_gla


def chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retention, chunk by chunk: `chunk_simple_gla` with the decay `1 - 2^(-5 - h)` of value head h = 0, 1, ...

    (RetNet, arXiv 2307.08621.) Arguments, results and errors are those of `chunk_simple_gla`; `kwargs` may have
    `chunk_size`.
    """
    check_ranks(q, k, v)
    return chunk_simple_gla(
        q,
        k,
        v,
        g_gamma=retention_decay(v.shape[2], q),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        **kwargs,
    )
