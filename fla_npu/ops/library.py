"""The ops as custom ops of `torch.library`, so that `torch.compile` traces models around them without a graph break.

One op serves all: it carries the arguments of the public functions, and runs the checks and the dispatch when it is
executed. Outside of `torch.compile` it is not used, since its bookkeeping costs more than decoding a token.
"""

from typing import Any

import torch
from torch import Tensor

from fla_npu.dtypes import compute_dtype
from fla_npu.ops.autograd import NO_BACKWARD
from fla_npu.ops.checks import HEAD_FIRST_REFUSED
from fla_npu.ops.run import differentiable, gradients, run

TENSORS = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"),
    *("gk", "gv", "b", "w", "cu_seqlens", "cu_seqlens_cpu", "chunk_indices"),
)
DIFFERENTIABLE = TENSORS[:12]
SCALARS = {
    "scale": None,
    "lower_bound": None,
    "chunk_size": None,
    "output_final_state": False,
    "use_qk_l2norm_in_kernel": False,
    "use_gate_in_kernel": False,
    "use_beta_sigmoid_in_kernel": False,
    "allow_neg_eigval": False,
    "safe_gate": False,
    "disable_recompute": False,
    "state_v_first": False,
    "num_householder": None,
}


WITHOUT_EFFECT = ("use_graph", "max_num_seqs", "transpose_state_layout")
UNTRACEABLE = ("return_intermediate_states", "cp_context")


def traced(op: str, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None, None]:
    """The call as one node of a graph."""
    for name in UNTRACEABLE:
        if arguments.get(name):
            raise NotImplementedError(f"{name} is not available under torch.compile")
    tensors = [arguments.get(name) for name in TENSORS]
    scalars = [arguments.get(name, default) for name, default in SCALARS.items()]
    both_layouts = arguments.get("transpose_state_layout") and arguments.get("state_v_first")
    if arguments.get("transpose_state_layout"):
        arguments["state_v_first"] = True
    silent = {*TENSORS, *SCALARS, *WITHOUT_EFFECT}
    others = [name for name, value in arguments.items() if name not in silent and value]
    if both_layouts:
        others.append("transpose_state_layout")
    if op in HEAD_FIRST_REFUSED and "head_first" in arguments:
        others.append("head_first")
    o, state = delta_rule(op, ",".join(others), *tensors, *scalars)
    return o, state if arguments.get("output_final_state") else None, None


def _arguments(others: str, tensors: tuple[Any, ...], scalars: tuple[Any, ...]) -> dict[str, Any]:
    """Keyword arguments of the public function: what it has no name for is None or False here and left out."""
    named = {
        **{name: True for name in others.split(",") if name},
        **dict(zip(TENSORS, tensors, strict=True)),
        **dict(zip(SCALARS, scalars, strict=True)),
    }
    return {name: value for name, value in named.items() if value is not None and value is not False}


@torch.library.custom_op("fla_npu::delta_rule", mutates_args=())
def delta_rule(
    op: str,
    others: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    b: Tensor | None,
    w: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    scale: float | None,
    lower_bound: float | None,
    chunk_size: int | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    safe_gate: bool,
    disable_recompute: bool,
    state_v_first: bool,
    num_householder: int | None,
) -> tuple[Tensor, Tensor]:
    """An op by its short name. `others` names further keyword arguments, for the checks to judge.

    Returns o and the final state, which is empty unless asked for.
    """
    tensors = (
        *(q, k, v, g, beta, A_log, dt_bias, initial_state, gk, gv, b, w),
        *(cu_seqlens, cu_seqlens_cpu, chunk_indices),
    )
    scalars = (
        *(scale, lower_bound, chunk_size, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, disable_recompute, state_v_first),
        num_householder,
    )
    with torch.no_grad():
        o, state, _ = run(op, **_arguments(others, tensors, scalars))
    return o, q.new_empty(0, dtype=torch.float32) if state is None else state


@delta_rule.register_fake
def _(op: str, others: str, *args: Any) -> tuple[Tensor, Tensor]:
    q, v, cu_seqlens = args[0], args[2], args[TENSORS.index("cu_seqlens")]
    named = dict(zip(SCALARS, args[len(TENSORS) :], strict=True))
    state_dtype = compute_dtype(q)
    o = v.new_empty(*q.shape[:2], *v.shape[2:])
    if not named["output_final_state"]:
        return o, q.new_empty(0, dtype=torch.float32)
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sides = (v.shape[3], q.shape[3]) if named["state_v_first"] else (q.shape[3], v.shape[3])
    state = q.new_empty(sequences, v.shape[2], *sides, dtype=state_dtype)
    return o, state


@torch.library.custom_op("fla_npu::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    op: str,
    others: str,
    do: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    b: Tensor | None,
    w: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    scale: float | None,
    lower_bound: float | None,
    chunk_size: int | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    safe_gate: bool,
    disable_recompute: bool,
    state_v_first: bool,
    num_householder: int | None,
) -> list[Tensor]:
    """Gradients of those tensors of `DIFFERENTIABLE` that the call has."""
    if not differentiable(op):  # only when it runs: a graph contains the backward pass whether it is wanted or not
        raise NotImplementedError(NO_BACKWARD)
    tensors = (
        *(q, k, v, g, beta, A_log, dt_bias, initial_state, gk, gv, b, w),
        *(cu_seqlens, cu_seqlens_cpu, chunk_indices),
    )
    scalars = (
        *(scale, lower_bound, chunk_size, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel),
        *(use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, disable_recompute, state_v_first),
        num_householder,
    )
    grads = gradients(op, do, d_state, **_arguments(others, tensors, scalars))
    present = [(x, grad) for x, grad in zip(tensors, grads, strict=False) if x is not None]
    return [torch.zeros_like(x) if grad is None else grad.reshape(x.shape) for x, grad in present]


@delta_rule_backward.register_fake
def _(op: str, others: str, do: Tensor, d_state: Tensor | None, *args: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in args[: len(DIFFERENTIABLE)] if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.op, ctx.others, *args = inputs
    ctx.save_for_backward(*args[: len(TENSORS)])
    ctx.scalars = args[len(TENSORS) :]
    ctx.has_state = args[len(TENSORS) + list(SCALARS).index("output_final_state")]


def _backward(ctx: Any, do: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grads = iter(
        delta_rule_backward(ctx.op, ctx.others, do, d_state if ctx.has_state else None, *tensors, *ctx.scalars)
    )
    by_tensor = [None if x is None else next(grads) for x in tensors[: len(DIFFERENTIABLE)]]
    others = len(TENSORS) - len(DIFFERENTIABLE) + len(SCALARS)
    return (None, None, *by_tensor, *[None] * others)


delta_rule.register_autograd(_backward, setup_context=_setup_context)
