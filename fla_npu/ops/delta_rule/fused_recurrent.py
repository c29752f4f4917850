"""`fused_recurrent_delta_rule`: DeltaNet for decoding and short sequences, with gradients."""

import torch

from fla_npu.ops.entry import call


def fused_recurrent_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule, with a lean path for one token per sequence.

    The recurrence and the arguments are those of `chunk_delta_rule`, except:

    Args:
        beta: `[B, T, HV]`, or `[B, T, HV, V]` for a step size per value channel, which runs token by token and has no
            backward pass under `torch.compile`; None means 1.
        scale: positive, as in FLA.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final state `[N, HV, K, V]` in float32, None unless asked for. Gradients
        as in `chunk_delta_rule`; those of a beta per value channel are right for any V, which FLA's are up to 32.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    return call(
        "fused_recurrent_delta_rule",
        q=q,
        k=k,
        v=v,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )[:2]
