"""`fused_recurrent_gla`: gated linear attention for decoding, in reverse or with decays of values, with gradients."""

from typing import Any

import torch

from fla_npu.ops.entry import call, call_backwards


def fused_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated linear attention, with a lean path for one token per sequence.

    The recurrence, the results and the arguments are those of `chunk_gla`, except:

    Args:
        gk: `[B, T, HV, K]`, log decay per key channel; None for none.
        gv: `[B, T, HV, V]`, further log decay per value channel, `S = diag(exp(gk_t)) S diag(exp(gv_t)) + k_t v_t^T`;
            such calls run token by token, and have no backward pass under `torch.compile`.
        initial_state: of any floating dtype.
        reverse: run every sequence from its last token to its first. The initial state is then the one after the last
            token, and the final state the one before the first.
        kwargs: `transpose_state_layout`, the deprecated name of `state_v_first`. Other names give a warning.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    run = call_backwards if reverse else call
    return run(
        "fused_recurrent_gla",
        q=q,
        k=k,
        v=v,
        g=gk,
        gv=gv,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        **kwargs,
    )[:2]
