"""The argument checks of every op, and the only code that builds a `Problem`.

Each public op hands all of its arguments, by keyword, to one `check_*` function here. What FLA 0.6.0 checks is checked
in FLA's order and refused with a class that FLA's callers can catch:

* `ShapeError` (a `ValueError` and an `AssertionError`) where FLA asserts, where its ops disagree about the class, and
  for shapes, dtypes and devices that FLA does not look at;
* `ValueError`, `NotImplementedError` and, for `head_first` in some ops, a raised `DeprecationWarning` where FLA has
  them; `ValueError` also for values (of `cu_seqlens`, `lower_bound`) that FLA does not look at;
* `TypeError` where FLA would fail on a missing attribute.

Decoding calls a check per layer and token, so a valid call costs a few attribute comparisons: about 9 microseconds.
Values that live on a device are not read here, unless `FLA_NPU_CHECK_VALUES` asks for it: those of `cu_seqlens` and of
the slots of a pool are checked when an implementation first needs them on the host, and kernels never do.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch

from fla_npu import settings
from fla_npu.errors import ShapeError
from fla_npu.ops.problem import Bounds, Options, Problem, Tensors
from fla_npu.utils import tensor_cache

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTS = frozenset({torch.int32, torch.int64})

SAFE_LOWER_BOUND = -5.0
"""Smallest per-step log decay of a safe gate: 16 steps stay within exp(80), below the largest float32."""


# --- public checks, one per op ------------------------------------------------------------------------------------


def check_chunk_gdn(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: Any,
) -> Problem:
    """Check a call of `chunk_gated_delta_rule`.

    `kwargs` are the op's own leftovers: `transpose_state_layout`, `head_first`, and names to warn about.
    """
    state_v_first = _state_layout(state_v_first, kwargs)
    check_ranks(q, k, v)
    if q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"q and k must have the same number of heads, got q.shape[2]={q.shape[2]} and k.shape[2]={k.shape[2]}"
        )
    _check_head_groups(q, v)
    if kwargs:
        _refuse_head_first("chunk_gdn", kwargs)
        _warn_unknown("chunk_gated_delta_rule", kwargs)
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"`chunk_size` must be 16, 32, or 64 for Gated Delta Rule, got {chunk_size}")
    _refuse_context_parallel(cp_context)
    _check_packing(q, initial_state, cu_seqlens)
    if use_gate_in_kernel and A_log is None:
        raise ShapeError("`A_log` must be provided when `use_gate_in_kernel=True`")
    _check_neg_eigval(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    return _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        decay="scalar",
        gate="softplus" if use_gate_in_kernel else "none",
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_indices=chunk_indices,
        chunk_size=chunk_size,
    )


def check_recurrent_gdn(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> Problem:
    """Check a call of `fused_recurrent_gated_delta_rule`.

    A call whose only decay is `gk` becomes one with a decay per key channel (`Tensors.g` is then `gk`). `beta=None`
    becomes ones, one per value head (FLA makes them per query head and reads past their end under GVA).
    """
    state_v_first = _state_layout(state_v_first, kwargs)
    check_ranks(q, k, v)
    if kwargs:
        _warn_unknown("fused_recurrent_gated_delta_rule", kwargs, ignored=("chunk_size", "head_first"))
    _check_packing(q, initial_state, cu_seqlens)
    if use_gate_in_kernel:
        if A_log is None:
            raise ShapeError("`A_log` must be provided when `use_gate_in_kernel=True`")
        if g is None:
            raise ValueError("`g`, the gate's logits, must be provided when `use_gate_in_kernel=True`")
    _check_neg_eigval(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    decay = "none" if g is None else "scalar"
    if g is None and gk is not None:
        decay, g, gk = "channel", gk, None
    return _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        gk=gk,
        gv=gv,
        beta=v.new_ones(v.shape[:3]) if beta is None else beta,
        beta_per_channel=True,
        decay=decay,
        gate="softplus" if use_gate_in_kernel else "none",
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


def check_chunk_kda(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> Problem:
    """Check a call of `chunk_kda`.

    `cu_seq_lens_q` is the name under which transformers hands over `cu_seqlens`; it counts when that is None.
    `safe_gate` without `use_gate_in_kernel` promises log decays in [-5, 0]; only `FLA_NPU_CHECK_VALUES` looks at them.
    """
    state_v_first = _state_layout(state_v_first, kwargs)
    cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    check_ranks(q, k, v)
    if kwargs:
        _warn_unknown("chunk_kda", kwargs, ignored=("head_first",))
    if use_graph and q.device.type != "cpu":
        raise NotImplementedError(
            f"use_graph=True is not supported on {q.device.type}: sequence bounds are read on the host, "
            "so a captured graph would replay those it was captured with"
        )
    _refuse_context_parallel(cp_context)
    _check_packing(q, initial_state, cu_seqlens)
    _check_state_dtype(q, initial_state)
    gate = _kda_gate(use_gate_in_kernel, A_log, lower_bound)
    if chunk_size not in (32, 64):
        raise ValueError(f"`chunk_size` must be either 32 or 64 for KDA, got {chunk_size}")
    if safe_gate and use_gate_in_kernel:
        _check_safe_bound(lower_bound)
    _check_neg_eigval(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    problem = _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        decay="channel",
        gate=gate,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        intermediate_states=return_intermediate_states,
        keep_states=disable_recompute,
    )
    if safe_gate and not use_gate_in_kernel and settings.check_values():
        _check_safe_decay(g)
    if use_graph and max_num_seqs is not None and cu_seqlens is not None and cu_seqlens.shape[0] - 1 != max_num_seqs:
        raise ShapeError(
            f"cu_seqlens must be padded with empty sequences to max_num_seqs + 1 = {max_num_seqs + 1} entries, "
            f"got {cu_seqlens.shape[0]}"
        )
    if return_intermediate_states:
        _check_intermediate_states(disable_recompute)
    return problem


def check_recurrent_kda(
    *,
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
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> Problem:
    """Check a call of `fused_recurrent_kda`. `cu_seq_lens_q` as in `check_chunk_kda`; `safe_gate` changes nothing."""
    state_v_first = _state_layout(state_v_first, kwargs)
    cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    check_ranks(q, k, v)
    if kwargs:
        _warn_unknown("fused_recurrent_kda", kwargs, ignored=("chunk_size", "head_first", "safe_gate"))
    _check_packing(q, initial_state, cu_seqlens)
    _check_neg_eigval(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    return _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        beta_per_channel=True,
        decay="channel",
        gate=_kda_gate(use_gate_in_kernel, A_log, lower_bound),
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


def check_chunk_gdn2(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    w: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: object | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: Any,
) -> Problem:
    """Check a call of `chunk_gdn2`. The gates b and w take the place of beta, which becomes ones."""
    state_v_first = _state_layout(state_v_first, kwargs)
    check_ranks(q, k, v)
    if kwargs:
        _warn_unknown("chunk_gdn2", kwargs)
    _check_tensor("b", b)
    _check_tensor("w", w)
    _refuse_context_parallel(cp_context)
    _check_packing(q, initial_state, cu_seqlens)
    _check_state_dtype(q, initial_state)
    gate = _kda_gate(use_gate_in_kernel, A_log, lower_bound)
    if chunk_size != 64:
        raise ValueError(f"`chunk_size` must be 64 for GDN-2, got {chunk_size}")
    if safe_gate and use_gate_in_kernel:
        _check_safe_bound(lower_bound)
    problem = _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=v.new_ones(v.shape[:3]),
        b=b,
        w=w,
        decay="channel",
        gate=gate,
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
        intermediate_states=return_intermediate_states,
        keep_states=disable_recompute,
    )
    if safe_gate and not use_gate_in_kernel and settings.check_values():
        _check_safe_decay(g)
    if return_intermediate_states:
        _check_intermediate_states(disable_recompute)
    return problem


def check_recurrent_gdn2(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    b: torch.Tensor,
    w: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> Problem:
    """Check a call of `fused_recurrent_gdn2`. As in `check_chunk_gdn2`, beta becomes ones."""
    state_v_first = _state_layout(state_v_first, kwargs)
    check_ranks(q, k, v)
    if kwargs:
        _warn_unknown("fused_recurrent_gdn2", kwargs, ignored=("chunk_size", "safe_gate"))
    _check_tensor("b", b)
    _check_tensor("w", w)
    _check_packing(q, initial_state, cu_seqlens)
    return _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=v.new_ones(v.shape[:3]),
        b=b,
        w=w,
        decay="channel",
        gate=_kda_gate(use_gate_in_kernel, A_log, lower_bound),
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


def check_chunk_delta_product(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    num_householder: int,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: object | None = None,
) -> Problem:
    """Check a call of `chunk_gated_delta_product`. Chunks are of whole tokens, with at most 64 updates if they can."""
    check_ranks(q, k, v)
    if not isinstance(num_householder, int) or num_householder < 1:
        raise ValueError(f"num_householder must be an integer of at least 1, got {_describe(num_householder)}")
    _refuse_context_parallel(cp_context)
    _check_packing(q, initial_state, cu_seqlens)
    return _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        decay="none" if g is None else "scalar",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=max(1, 64 // num_householder),
        updates=num_householder,
    )


def check_chunk_delta_rule(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_size: int = 64,
    **kwargs: Any,
) -> Problem:
    """Check a call of `chunk_delta_rule`."""
    check_ranks(q, k, v)
    if kwargs:
        _refuse_head_first("chunk_delta_rule", kwargs)
        _warn_unknown("chunk_delta_rule", kwargs)
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"`chunk_size` must be 16, 32, or 64, got {chunk_size}")
    _check_packing(q, initial_state, cu_seqlens)
    return _problem(
        q=q,
        k=k,
        v=v,
        g=None,
        beta=beta,
        decay="none",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size,
    )


def check_recurrent_delta_rule(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> Problem:
    """Check a call of `fused_recurrent_delta_rule`. `beta=None` becomes ones, one per value head."""
    check_ranks(q, k, v)
    _check_packing(q, initial_state, cu_seqlens)
    if isinstance(scale, Real) and not scale > 0:
        raise ShapeError(f"scale must be positive, got {scale}")
    return _problem(
        q=q,
        k=k,
        v=v,
        g=None,
        beta=v.new_ones(v.shape[:3]) if beta is None else beta,
        beta_per_channel=True,
        decay="none",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def constant_decay(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, g_gamma: torch.Tensor | None
) -> torch.Tensor | None:
    """`g` of a call of simple GLA, which `g_gamma` `[HV]` gives once for all tokens."""
    if g_gamma is None:
        return g
    if g is not None:
        raise ValueError("pass the decay as g, one per token, or as g_gamma, one for all tokens, not as both")
    check_ranks(q, k, v)
    _check_operand("g_gamma", g_gamma, "[HV]", (v.shape[2],), q.device)
    return g_gamma.expand(*q.shape[:2], -1)


def check_chunk_simple_gla(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> Problem:
    """Check a call of `chunk_simple_gla`. Chunks of more than 64 tokens become several, as sums of more decays are not
    exact."""
    state_v_first = _state_layout(state_v_first, kwargs)
    check_ranks(q, k, v)
    if kwargs:
        _refuse_head_first("chunk_simple_gla", kwargs)
        _warn_unknown("chunk_simple_gla", kwargs)
    if chunk_size is None:
        chunk_size = 64
    elif type(chunk_size) is not int or chunk_size < 1 or chunk_size.bit_count() != 1:
        raise ValueError(f"`chunk_size` must be a power of 2, got {chunk_size}")
    _check_packing(q, initial_state, cu_seqlens)
    return _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=None,
        decay="none" if g is None else "scalar",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=min(chunk_size, 64),
        delta=False,
    )


def check_recurrent_simple_gla(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> Problem:
    """Check a call of `fused_recurrent_simple_gla`."""
    state_v_first = _state_layout(state_v_first, kwargs)
    check_ranks(q, k, v)
    if kwargs:
        _warn_unknown("fused_recurrent_simple_gla", kwargs, ignored=("chunk_size", "head_first"))
    _check_packing(q, initial_state, cu_seqlens)
    return _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=None,
        decay="none" if g is None else "scalar",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        delta=False,
    )


def check_chunk_gla(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> Problem:
    """Check a call of `chunk_gla`."""
    check_ranks(q, k, v)
    _check_packing(q, initial_state, cu_seqlens)
    _check_state_dtype(q, initial_state)
    return _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=None,
        decay="channel",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        delta=False,
    )


def check_recurrent_gla(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> Problem:
    """Check a call of `fused_recurrent_gla`, whose `gk` is `g` here: the decay of a chunk form."""
    state_v_first = _state_layout(state_v_first, kwargs)
    check_ranks(q, k, v)
    if kwargs:
        _warn_unknown("fused_recurrent_gla", kwargs, ignored=("chunk_size", "head_first"))
    _check_packing(q, initial_state, cu_seqlens)
    return _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        g_name="gk",
        gv=gv,
        beta=None,
        decay="none" if g is None else "channel",
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        delta=False,
    )


class Slots(NamedTuple):
    """Which slots of a pool of states a call of `fused_recurrent_kda_fwd` reads and writes, as host integers."""

    load: list[int]
    """Slot of each sequence's initial state, `[N]`; -1 for one without tokens."""
    store: list[list[int]]
    """Slots of each sequence's states after its tokens, `[N][tokens of the sequence]`."""


@dataclass(frozen=True, eq=False)
class StatePool:
    """The pool arguments of a call of `fused_recurrent_kda_fwd`."""

    indices: torch.Tensor
    """`ssm_state_indices`, `[N]` or `[N, S]`."""
    accepted: torch.Tensor | None
    """`num_accepted_tokens`, `[N]`."""
    read: Callable[[], Slots]

    @cached_property
    def slots(self) -> Slots:
        """Their values, every one checked. Waits for the device that they are on."""
        return self.read()


def check_recurrent_kda_fwd(
    *,
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
) -> tuple[Problem, StatePool | None]:
    """Check a call of `fused_recurrent_kda_fwd`, decoding with a pool of states.

    With `ssm_state_indices` (`[N]`, or `[N,S]` with one slot per token) `initial_state` is a pool `[slots,HV,K,V]`;
    the second result then tells the slots.
    """
    state_v_first = _state_layout(state_v_first, kwargs)
    check_ranks(q, k, v)
    if kwargs:
        _warn_unknown("fused_recurrent_kda_fwd", kwargs)
    if out is not None and (not isinstance(out, torch.Tensor) or out.shape != v.shape):
        raise ShapeError(f"out must have the shape of v {list(v.shape)}, got {_describe(out)}")
    if inplace_final_state and initial_state is None:
        raise ShapeError("inplace_final_state=True needs initial_state, which receives the final state")
    if ssm_state_indices is not None and initial_state is None:
        raise ShapeError("ssm_state_indices needs initial_state, the pool of states that they index")
    if num_accepted_tokens is not None and ssm_state_indices is None:
        raise ValueError("num_accepted_tokens needs ssm_state_indices")
    pooled = ssm_state_indices is not None
    _check_packing(q, None if pooled else initial_state, cu_seqlens)
    _check_neg_eigval(allow_neg_eigval, use_beta_sigmoid_in_kernel)
    problem = _problem(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        beta_per_channel=True,
        decay="channel",
        gate=_kda_gate(use_gate_in_kernel, A_log, lower_bound),
        lower_bound=lower_bound,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        initial_state=initial_state,
        pooled=pooled,
        output_final_state=inplace_final_state or output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    if ssm_state_indices is None or initial_state is None:
        return problem, None
    return problem, _state_pool(
        ssm_state_indices, num_accepted_tokens, problem, initial_state.shape[0], inplace_final_state
    )


# --- building blocks: arguments that are not tensors --------------------------------------------------------------

_warned_names: set[str] = set()


def _warn(message: str, category: type[Warning]) -> None:
    """Warn about the line that called into the package: Python shows a DeprecationWarning only to its own author."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch.").startswith(("fla_npu.", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _warn_unknown(op: str, kwargs: dict[str, Any], ignored: tuple[str, ...] = ()) -> None:
    """Warn, once per name, about arguments the op does not have; FLA drops them, so a typo changes the model.

    `ignored` names are known and change nothing in this op; `head_first=True` is still worth a warning.
    """
    for name, value in kwargs.items():
        if name in _warned_names or (name in ignored and not (name == "head_first" and value)):
            continue
        _warned_names.add(name)
        _warn(f"{op} ignores the argument `{name}`", UserWarning)


HEAD_FIRST_REFUSED = frozenset({"chunk_gdn", "chunk_delta_rule", "chunk_simple_gla"})
"""Ops whose checks raise for `head_first`, whatever its value."""


def _refuse_head_first(op: str, kwargs: dict[str, Any]) -> None:
    if op in HEAD_FIRST_REFUSED and "head_first" in kwargs:
        raise DeprecationWarning("head_first has been removed: pass inputs as `[B, T, H, ...]`")


def _state_layout(state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """`state_v_first`, or its old name, which is taken out of `kwargs`."""
    if not kwargs or "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("pass `state_v_first` or its deprecated name `transpose_state_layout`, not both")
    _warn("`transpose_state_layout` is deprecated: use `state_v_first`", DeprecationWarning)
    return bool(kwargs.pop("transpose_state_layout"))


def _refuse_context_parallel(cp_context: object | None) -> None:
    if cp_context is not None:
        raise NotImplementedError("cp_context must be None: context parallelism is not supported")


def _check_neg_eigval(allow_neg_eigval: bool, beta_sigmoid: bool) -> None:
    if allow_neg_eigval and not beta_sigmoid:
        raise ValueError("`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`")


def _check_safe_bound(lower_bound: float | None) -> None:
    if lower_bound is None:
        raise ValueError("`lower_bound` must be given when `safe_gate=True` and `use_gate_in_kernel=True`")
    if not SAFE_LOWER_BOUND <= lower_bound < 0:
        raise ValueError(f"`lower_bound` must be in the safe range [-5, 0), got {lower_bound}")


def _check_intermediate_states(disable_recompute: bool) -> None:
    if not torch.is_inference_mode_enabled():
        raise ShapeError("return_intermediate_states is only allowed in inference mode: use torch.inference_mode()")
    if disable_recompute:
        raise ShapeError("return_intermediate_states needs disable_recompute=False")


def _kda_gate(use_gate: bool, A_log: torch.Tensor | None, lower_bound: float | None) -> str:
    """The gate of a KDA op (`Options.gate`); any `lower_bound` selects the bounded one."""
    if not use_gate:
        return "none"
    if lower_bound is not None:
        return "bounded"
    if A_log is None:
        raise ValueError("`A_log` must be provided when `use_gate_in_kernel=True` and `lower_bound` is not set")
    return "softplus"


@lru_cache(maxsize=1024)
def _options(
    *,
    decay: str,
    scale: float,
    qk_l2norm: bool,
    gate: str,
    lower_bound: float | None,
    beta_sigmoid: bool,
    neg_eigval: bool,
    state_v_first: bool,
    output_final_state: bool,
    chunk_size: int,
    intermediate_states: bool,
    keep_states: bool,
    updates: int,
) -> Options:
    """Options from arguments whose types are checked here, once per combination thanks to the cache."""
    flags = {
        "use_qk_l2norm_in_kernel": qk_l2norm,
        "use_beta_sigmoid_in_kernel": beta_sigmoid,
        "allow_neg_eigval": neg_eigval,
        "state_v_first": state_v_first,
        "output_final_state": output_final_state,
        "return_intermediate_states": intermediate_states,
        "disable_recompute": keep_states,
    }
    for name, flag in flags.items():
        if not isinstance(flag, int | None):
            raise TypeError(f"{name} must be a bool, got {_describe(flag)}")
    for name, number in (("scale", scale), ("lower_bound", lower_bound)):
        if not isinstance(number, Real | None):
            raise TypeError(f"{name} must be a number or None, got {_describe(number)}")
    if gate == "bounded" and not (lower_bound is not None and lower_bound < 0):
        raise ValueError(f"`lower_bound` must be negative, got {lower_bound}")
    return Options(
        decay=decay,
        scale=float(scale),
        qk_l2norm=bool(qk_l2norm),
        gate=gate,
        lower_bound=float(lower_bound) if gate == "bounded" and lower_bound is not None else None,
        beta_sigmoid=bool(beta_sigmoid),
        beta_scale=2.0 if neg_eigval else 1.0,
        state_v_first=bool(state_v_first),
        output_final_state=bool(output_final_state),
        chunk_size=int(chunk_size),
        return_intermediate_states=bool(intermediate_states),
        keep_states=bool(keep_states),
        updates=updates,
    )


# --- building blocks: tensors -------------------------------------------------------------------------------------


def _describe(x: object) -> str:
    """An argument in an error message."""
    if isinstance(x, torch.Tensor):
        return f"a {x.dtype} tensor of shape {list(x.shape)}"
    return f"{type(x).__name__} {x!r}"


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {_describe(x)}")


def check_ranks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k and v are tensors of four dimensions: what every later check relies on."""
    for name, x, letters in (("q", q, "[B, T, H, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        _check_tensor(name, x)
        if x.ndim != 4:
            raise ShapeError(f"{name} must have shape {letters}, got {list(x.shape)}")


def _check_head_groups(q: torch.Tensor, v: torch.Tensor) -> None:
    heads, value_heads = q.shape[2], v.shape[2]
    if heads < 1 or value_heads < 1 or value_heads % heads != 0:
        raise ShapeError(
            f"For GVA, num_v_heads (HV={value_heads}) must be evenly divisible by num_heads (H={heads}), "
            "both at least 1"
        )


def _check_cu_seqlens(cu_seqlens: torch.Tensor) -> None:
    _check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype not in INTS:
        raise ShapeError(
            f"cu_seqlens must be an int32 or int64 tensor of shape [N + 1] with N >= 1, got {_describe(cu_seqlens)}"
        )


def _check_packing(q: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> None:
    """What FLA asks of packed sequences: one row of tokens, an initial state for each sequence."""
    if initial_state is not None:
        _check_tensor("initial_state", initial_state)
    if cu_seqlens is None:
        return
    _check_cu_seqlens(cu_seqlens)
    if q.shape[0] != 1:
        raise ValueError(
            f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`: "
            "pack the sequences along T first"
        )
    if initial_state is not None and initial_state.ndim and initial_state.shape[0] != cu_seqlens.shape[0] - 1:
        raise ValueError(
            "The number of initial states is expected to be equal to the number of input sequences, "
            f"i.e., {cu_seqlens.shape[0] - 1} rather than {initial_state.shape[0]}"
        )


def _check_state_dtype(q: torch.Tensor, initial_state: torch.Tensor | None) -> None:
    """FLA's KDA and GDN-2 want float32. float64, which it does not have, is what calls in float64 return."""
    if initial_state is None or initial_state.dtype == torch.float32 or initial_state.dtype == q.dtype == torch.float64:
        return
    raise ShapeError(f"initial_state must be in float32, got {initial_state.dtype}")


def _check_float(name: str, x: torch.Tensor, device: torch.device) -> None:
    if x.dtype not in FLOATS:
        raise ShapeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.device != device:
        raise ShapeError(f"all tensors must be on the device of q, {device}, but {name} is on {x.device}")


def _check_operand(
    name: str, x: torch.Tensor | None, letters: str, shape: tuple[int, ...], device: torch.device
) -> None:
    """`x` is a floating tensor of that shape on that device."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {_describe(x)}")
    if x.shape != shape:
        raise ShapeError(f"{name} must have shape {letters}={list(shape)}, got {list(x.shape)}")
    _check_float(name, x, device)


def gate_parameter(name: str, x: torch.Tensor, letters: str, numel: int, device: torch.device) -> torch.Tensor:
    """A_log or dt_bias, checked and flat; models keep them in shapes such as `[1, 1, HV, 1]`."""
    _check_tensor(name, x)
    if x.numel() != numel:
        raise ShapeError(f"{name} must have {letters}={numel} elements, got shape {list(x.shape)}")
    _check_float(name, x, device)
    return x if x.ndim == 1 else x.reshape(numel)


def _check_state(
    state: torch.Tensor, rows: int | None, heads: int, key_dim: int, value_dim: int, v_first: bool, device: torch.device
) -> None:
    """Layout of a state or, when `rows` is None, of a pool of states."""
    inner = (heads, value_dim, key_dim) if v_first else (heads, key_dim, value_dim)
    letters = "HV, V, K" if v_first else "HV, K, V"
    if state.shape != ((state.shape[0] if state.ndim else 0, *inner) if rows is None else (rows, *inner)):
        hint = ""
        if state.ndim == 4 and state.shape[1:] == (heads, inner[2], inner[1]):
            hint = f"; it looks {'K' if v_first else 'V'}-first: pass state_v_first={not v_first}"
        raise ShapeError(
            f"initial_state must have shape [N, {letters}]={['any' if rows is None else rows, *inner]} "
            f"with state_v_first={bool(v_first)}, got {list(state.shape)}{hint}"
        )
    _check_float("initial_state", state, device)


def _check_safe_decay(g: torch.Tensor) -> None:
    if g.numel() and not bool(((g >= SAFE_LOWER_BOUND) & (g <= 0)).all()):
        raise ValueError(f"safe_gate=True promises g in [-5, 0], got [{g.min().item()}, {g.max().item()}]")


def _problem(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    decay: str,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
    gate: str = "none",
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    w: torch.Tensor | None = None,
    lower_bound: float | None = None,
    beta_per_channel: bool = False,
    pooled: bool = False,
    chunk_size: int = 64,
    intermediate_states: bool = False,
    keep_states: bool = False,
    updates: int = 1,
    delta: bool = True,
    g_name: str = "g",
) -> Problem:
    """Check every shape, dtype and device, and put the call together. q, k and v have four dimensions.

    Args:
        delta: whether the op has the delta rule, and beta.
        g_name: what the op calls g.
    """
    shape, device, dtype = q.shape, q.device, q.dtype
    batch, length, heads, key_dim = shape
    rows, letter = length * updates, "T" if updates == 1 else "T * num_householder"
    if k.shape != (shape if updates == 1 else (batch, rows, heads, key_dim)):
        if updates == 1:
            raise ShapeError(f"q and k must have the same shape, got q={list(shape)} vs k={list(k.shape)}")
        raise ShapeError(f"k must have shape [B, {letter}, H, K]={[batch, rows, heads, key_dim]}, got {list(k.shape)}")
    _check_head_groups(q, v)
    value_shape = v.shape
    value_heads, value_dim = value_shape[2], value_shape[3]
    if value_shape[0] != batch or value_shape[1] != rows:
        raise ShapeError(
            f"v must have shape [B, {letter}, HV, V] with B={batch} and {letter}={rows}, got {list(value_shape)}"
        )
    if key_dim < 1 or value_dim < 1:
        raise ShapeError(f"the head dimensions K and V must be at least 1, got K={key_dim} and V={value_dim}")
    _check_float("q", q, device)
    if k.dtype != dtype or v.dtype != dtype:
        raise ShapeError(f"q, k and v must have one dtype, got {dtype}, {k.dtype} and {v.dtype}")
    _check_float("k", k, device)
    _check_float("v", v, device)

    per_head = (batch, length, value_heads)
    if decay == "scalar":
        _check_operand(g_name, g, "[B, T, HV]", per_head, device)
    elif decay == "channel":
        _check_operand(g_name, g, "[B, T, HV, K]", (*per_head, key_dim), device)
    if gk is not None:
        _check_operand("gk", gk, "[B, T, HV, K]", (*per_head, key_dim), device)
    if gv is not None:
        _check_operand("gv", gv, "[B, T, HV, V]", (*per_head, value_dim), device)
    if b is not None:
        _check_operand("b", b, "[B, T, HV, K]", (*per_head, key_dim), device)
    if w is not None:
        _check_operand("w", w, "[B, T, HV, V]", (*per_head, value_dim), device)
    if beta_per_channel and isinstance(beta, torch.Tensor) and beta.ndim == 4:
        _check_operand("beta", beta, "[B, T, HV, V]", (*per_head, value_dim), device)
    elif delta:
        _check_operand("beta", beta, f"[B, {letter}, HV]", (batch, rows, value_heads), device)

    if gate == "none":
        A_log = dt_bias = None
    if A_log is not None:
        A_log = gate_parameter("A_log", A_log, "HV", value_heads, device)
    if dt_bias is not None:
        letters, numel = ("HV", value_heads) if decay == "scalar" else ("HV*K", value_heads * key_dim)
        dt_bias = gate_parameter("dt_bias", dt_bias, letters, numel, device)

    if initial_state is not None:
        states = None if pooled else batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        _check_state(initial_state, states, value_heads, key_dim, value_dim, state_v_first, device)
    bounds = None
    if cu_seqlens is not None:
        bounds = Bounds(cu_seqlens, partial(sequence_bounds, cu_seqlens, length, cu_seqlens_cpu))
        if cu_seqlens.device.type == "cpu" or cu_seqlens_cpu is not None or settings.check_values():
            bounds.values()
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu is a host copy of cu_seqlens, which must be given too")
    if chunk_indices is not None:
        _check_chunk_indices(chunk_indices, bounds, chunk_size)

    options = _options(
        decay=decay,
        scale=key_dim**-0.5 if scale is None else scale,
        qk_l2norm=qk_l2norm,
        gate=gate,
        lower_bound=lower_bound,
        beta_sigmoid=beta_sigmoid,
        neg_eigval=neg_eigval,
        state_v_first=state_v_first,
        output_final_state=output_final_state,
        chunk_size=chunk_size,
        intermediate_states=intermediate_states,
        keep_states=keep_states,
        updates=updates,
    )
    return Problem(Tensors(q, k, v, g, beta, A_log, dt_bias, initial_state, gk, gv, b, w), options, bounds)


# --- building blocks: packed sequences and pools of states --------------------------------------------------------


@tensor_cache
def _device_values(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.tolist())


def sequence_bounds(
    cu_seqlens: torch.Tensor, length: int | None = None, cu_seqlens_cpu: torch.Tensor | None = None
) -> tuple[int, ...]:
    """The bounds of packed sequences as host integers, checked: `(0, ..., length)`, any end when `length` is None.

    They come from `cu_seqlens_cpu` when it is given. `cu_seqlens` itself is compared with it where that costs nothing,
    or when `FLA_NPU_CHECK_VALUES` asks for it.
    """
    _check_cu_seqlens(cu_seqlens)
    on_cpu = cu_seqlens.device.type == "cpu"
    if cu_seqlens_cpu is not None:
        _check_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
        if (
            cu_seqlens_cpu.shape != cu_seqlens.shape
            or cu_seqlens_cpu.dtype not in INTS
            or cu_seqlens_cpu.device.type != "cpu"
        ):
            raise ShapeError(
                f"cu_seqlens_cpu must be a CPU copy of cu_seqlens, {_describe(cu_seqlens)}, "
                f"got {_describe(cu_seqlens_cpu)} on {cu_seqlens_cpu.device}"
            )
        bounds = tuple(cu_seqlens_cpu.tolist())
        if (on_cpu or settings.check_values()) and tuple(cu_seqlens.tolist()) != bounds:
            raise ValueError("cu_seqlens and cu_seqlens_cpu must hold the same values")
    elif on_cpu:  # as cheap as looking up an earlier copy, and always up to date
        bounds = tuple(cu_seqlens.tolist())
    else:
        bounds = _device_values(cu_seqlens)
    if bounds[0] != 0 or (length is not None and bounds[-1] != length):
        end = "" if length is None else f" and end at T={length}"
        raise ValueError(f"cu_seqlens must start at 0{end}, got {bounds[0]} and {bounds[-1]}")
    if any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must not decrease, got {list(bounds)}")
    return bounds


def _check_chunk_indices(indices: torch.Tensor, bounds: Bounds | None, chunk_size: int) -> None:
    """Precomputed (sequence, chunk) pairs match the call; nothing here needs them, but wrong ones mean a mistake.

    How many there have to be is checked where the bounds are known.
    """
    _check_tensor("chunk_indices", indices)
    if bounds is None:
        raise ValueError("chunk_indices describes packed sequences: pass cu_seqlens too")
    chunks = sum(-(-(b - a) // chunk_size) for a, b in pairwise(bounds)) if bounds.known else None
    shaped = indices.ndim == 2 and indices.shape[1] == 2 and chunks in (None, indices.shape[0])
    if not shaped or indices.dtype not in INTS:
        known = "" if chunks is None else f"=[{chunks}, 2]"
        raise ShapeError(
            f"chunk_indices must be an int32 or int64 tensor of shape [NT, 2]{known} for "
            f"chunk_size={chunk_size}, got {_describe(indices)}"
        )


def _state_pool(
    indices: torch.Tensor, accepted: torch.Tensor | None, problem: Problem, slots: int, inplace: bool
) -> StatePool:
    """`ssm_state_indices` and `num_accepted_tokens`, checked: their values too where the host has them."""
    tensors, _, bounds = problem
    tokens = tensors.v.shape[1]
    sequences = tensors.v.shape[0] if bounds is None else len(bounds) - 1
    lengths_known = not isinstance(bounds, Bounds) or bounds.known
    # Of unknown lengths, one is at least their mean.
    longest = max(problem.lengths, default=0) if lengths_known else -(-tokens // sequences)
    _check_tensor("ssm_state_indices", indices)
    if indices.ndim not in (1, 2) or indices.shape[0] != sequences or indices.dtype not in INTS:
        raise ShapeError(
            f"ssm_state_indices must be an int32 or int64 tensor of shape [N]=[{sequences}] or [N, tokens], "
            f"got {_describe(indices)}"
        )
    _check_columns(indices, longest)
    if not inplace and longest > 1:
        raise ValueError("ssm_state_indices with several tokens per sequence needs inplace_final_state=True")
    if accepted is not None:
        _check_tensor("num_accepted_tokens", accepted)
        if accepted.shape != (sequences,) or accepted.dtype not in INTS:
            raise ShapeError(
                f"num_accepted_tokens must be an int32 or int64 tensor of shape [N]=[{sequences}], "
                f"got {_describe(accepted)}"
            )
    pool = StatePool(indices, accepted, partial(_slots, indices, accepted, problem, slots))
    on_host = lengths_known and all(x is None or x.device.type == "cpu" for x in (indices, accepted))
    if on_host or settings.check_values():
        _ = pool.slots
    return pool


def _check_columns(indices: torch.Tensor, longest: int) -> None:
    if (indices.shape[1] if indices.ndim == 2 else 1) < longest:
        raise ValueError(
            f"ssm_state_indices must have one slot per token, so a shape [N, S] with S >= {longest}, "
            f"got {list(indices.shape)}"
        )


def _slots(indices: torch.Tensor, accepted: torch.Tensor | None, problem: Problem, slots: int) -> Slots:
    """Slots to read and write, every one checked."""
    lengths = problem.lengths
    _check_columns(indices, max(lengths, default=0))
    table = (indices if indices.ndim == 2 else indices[:, None]).tolist()
    first = [0] * len(lengths) if accepted is None else [count - 1 for count in accepted.tolist()]
    load, store = [], []
    for row, column, length in zip(table, first, lengths, strict=True):
        if length and not 0 <= column < len(row):
            raise ValueError(f"num_accepted_tokens must be between 1 and {len(row)}, got {column + 1}")
        load.append(row[column] if length else -1)
        store.append(row[:length])
        used = [*row[:length], row[column]] if length else []
        if any(not 0 <= slot < slots for slot in used):
            raise ValueError(f"ssm_state_indices must be between 0 and {slots - 1}, got {row}")
    return Slots(load, store)
