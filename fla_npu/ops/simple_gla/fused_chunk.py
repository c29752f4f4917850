"""`fused_chunk_simple_gla`: another name of `chunk_simple_gla`, whose walk over the chunks is one here."""

import torch

from fla_npu.ops.simple_gla.chunk import chunk_simple_gla


def fused_chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_simple_gla`, with the arguments that FLA's op of this name has."""
    return chunk_simple_gla(
        q,
        k,
        v,
        g=g,
        g_gamma=g_gamma,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
