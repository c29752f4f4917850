"""`fused_chunk_retention`: another name of `chunk_retention`, whose walk over the chunks is one here."""

import torch

from fla_npu.ops.retention.chunk import chunk_retention


def fused_chunk_retention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_retention`, with the arguments that FLA's op of this name has."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)
