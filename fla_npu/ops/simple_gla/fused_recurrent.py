"""`fused_recurrent_simple_gla`: linear attention with a decay per head for decoding and in reverse, with gradients."""

from typing import Any

import torch

from fla_npu.ops.checks import constant_decay
from fla_npu.ops.entry import call, call_backwards


def fused_recurrent_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Linear attention with a decay per head, with a lean path for one token per sequence.

    The recurrence, the results and the arguments are those of `chunk_simple_gla`, except:

    Args:
        reverse: run every sequence from its last token to its first. The initial state is then the one after the last
            token, and the final state the one before the first.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    run = call_backwards if reverse else call
    return run(
        "fused_recurrent_simple_gla",
        q=q,
        k=k,
        v=v,
        g=constant_decay(q, k, v, g, g_gamma),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        **kwargs,
    )[:2]
