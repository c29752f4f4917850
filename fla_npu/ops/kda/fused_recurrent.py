"""`fused_recurrent_kda`: Kimi Delta Attention for decoding and short sequences, also over a pool of states."""

from typing import Any

import torch

from fla_npu.ops.checks import check_recurrent_kda_fwd
from fla_npu.ops.common.pool import recurrent_in_place
from fla_npu.ops.entry import call


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention without a backward pass, with a lean path for one token per sequence.

    The recurrence and the arguments are those of `chunk_kda` (mind the position of `A_log` and `dt_bias`), except:

    Args:
        beta: `[B, T, HV]`, or `[B, T, HV, V]` for a step size per value channel.
        initial_state: any floating dtype.

    Returns:
        o `[B, T, HV, V]` in v's dtype, and the final state `[N, HV, K, V]` (or V-first) in float32, None unless asked
        for. A backward pass through them raises NotImplementedError (FLA detaches them silently).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    return call(
        "fused_recurrent_kda",
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seq_lens_q if cu_seqlens is None else cu_seqlens,
        **kwargs,
    )[:2]


def fused_recurrent_kda_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """KDA decoding as servers do it: states updated in place, possibly in a pool. No gradients.

    The arguments are those of `fused_recurrent_kda`, except:

    Args:
        initial_state: `[N, HV, K, V]` (or V-first), or with `ssm_state_indices` a pool `[slots, HV, K, V]`.
        inplace_final_state: write the final states into `initial_state`, which is then required and returned.
        ssm_state_indices: `[N]` or `[N, S]` slots of the pool. Sequence n starts from slot `[n, 0]`, and its state
            after token t goes to slot `[n, t]`. Sequences without tokens are left alone. Slots that lie on a device
            are not read on the host if a kernel runs the call (see `FLA_NPU_CHECK_VALUES`): it leaves a sequence that
            starts from a slot outside of the pool alone, with o = 0 (servers pad with -1), and writes no such slot.
        num_accepted_tokens: `[N]`; sequence n starts from slot `[n, num_accepted_tokens[n] - 1]` instead.
        out: receives o; of v's shape.

    Returns:
        `(out, final_state)`; without `inplace_final_state` the second is new, and None unless asked for.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    problem, pool = check_recurrent_kda_fwd(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=initial_state,
        scale=scale,
        output_final_state=output_final_state,
        inplace_final_state=inplace_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        ssm_state_indices=ssm_state_indices,
        num_accepted_tokens=num_accepted_tokens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        out=out,
        **kwargs,
    )
    return recurrent_in_place(problem, pool, inplace=inplace_final_state, out=out)
