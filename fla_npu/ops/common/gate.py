"""The gate formulas, once: log decay from logits, and beta from logits.

With `x` the logits plus bias and `a = exp(A_log)` (FLA 0.6.0, `gate.py` of `gated_delta_rule`, `kda` and `common`):

    softplus:  log decay = -a * softplus(x)             softplus(x) = x from x = 20 on, where they agree to rounding
    bounded:   log decay = lower_bound * sigmoid(a * x)
    beta    =  scale * sigmoid(logit)

`gate_forward` and `gate_backward` work on any slice, so that a chunked kernel can call them chunk by chunk;
`fused_gate` and `fused_beta_sigmoid` are the differentiable wholes. Everything is computed in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F

SOFTPLUS_THRESHOLD = 20.0


def gate_forward(
    x: torch.Tensor,
    a: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """Log decay of the logits `x`, in the shape and dtype of `x`; at most 0.

    Args:
        x: logits, float32 (or float64 in tests).
        a: `exp(A_log)`, broadcastable to `x`; None means 1.
        bias: `dt_bias`, broadcastable to `x`, or None.
        kind: `softplus` or `bounded`, as in `Options.gate`.
        lower_bound: the smallest log decay, negative; for `bounded` only.
    """
    x = x if bias is None else x + bias
    if kind == "softplus":
        y = F.softplus(x, threshold=SOFTPLUS_THRESHOLD)
        return -y if a is None else -a * y
    assert lower_bound is not None, "the bounded gate has a lower bound"
    return lower_bound * torch.sigmoid(x if a is None else a * x)


def gate_backward(
    x: torch.Tensor,
    a: torch.Tensor | None,
    bias: torch.Tensor | None,
    kind: str,
    lower_bound: float | None,
    d_log_decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `gate_forward`, whose first arguments these are, given that of its result.

    Returns:
        `(dx, d_a_log)`, both with the shape of `x` and not reduced: the gradient of the bias is `dx`, that of `A_log`
        is `d_a_log`, each summed over the dimensions along which the parameter was broadcast.
    """
    x = x if bias is None else x + bias
    if kind == "softplus":
        slope = -torch.sigmoid(x)
        dx = d_log_decay * (slope if a is None else a * slope)
        # exp(A_log) is a factor of the log decay, which is therefore its own derivative by A_log.
        return dx, d_log_decay * gate_forward(x, a, None, kind)
    assert lower_bound is not None, "the bounded gate has a lower bound"
    s = torch.sigmoid(x if a is None else a * x)
    dx = d_log_decay * (lower_bound * s * (1 - s))
    dx = dx if a is None else dx * a
    return dx, dx * x


def fused_gate(
    x: torch.Tensor,
    A_log: torch.Tensor | None,
    bias: torch.Tensor | None,
    lower_bound: float | None,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Differentiable gate: softplus without `lower_bound`, bounded with it.

    Only the inputs are kept for the backward pass, not the float32 activations.

    Args:
        x: logits of any floating dtype.
        A_log, bias: broadcastable to `x`, of any floating dtype, or None.

    Returns:
        The log decay, with the shape of `x`, in `output_dtype`.
    """
    return _Gate.apply(x, A_log, bias, lower_bound, output_dtype)


def fused_gate_gradients(
    x: torch.Tensor,
    A_log: torch.Tensor | None,
    bias: torch.Tensor | None,
    lower_bound: float | None,
    d_log_decay: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `fused_gate` by x, A_log and bias, in their shapes and dtypes."""
    dx, d_a_log = gate_backward(
        x.float(), _exp(A_log), _float(bias), _kind(lower_bound), lower_bound, d_log_decay.float()
    )
    return (
        dx.to(x.dtype),
        None if A_log is None else d_a_log.sum_to_size(A_log.shape).to(A_log.dtype),
        None if bias is None else dx.sum_to_size(bias.shape).to(bias.dtype),
    )


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        A_log: torch.Tensor | None,
        bias: torch.Tensor | None,
        lower_bound: float | None,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, A_log, bias)
        ctx.lower_bound = lower_bound
        return gate_forward(x.float(), _exp(A_log), _float(bias), _kind(lower_bound), lower_bound).to(output_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, A_log, bias = ctx.saved_tensors
        return (*fused_gate_gradients(x, A_log, bias, ctx.lower_bound, grads[0]), None, None)


def _kind(lower_bound: float | None) -> str:
    return "softplus" if lower_bound is None else "bounded"


def _exp(A_log: torch.Tensor | None) -> torch.Tensor | None:
    return None if A_log is None else A_log.float().exp()


def _float(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float()


def fused_beta_sigmoid(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`scale * sigmoid(x)` in float32, differentiable; `scale` is 2 for `allow_neg_eigval`."""
    return _BetaSigmoid.apply(x, scale)


def fused_beta_sigmoid_fwd(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`scale * sigmoid(x)` in float32."""
    return scale * torch.sigmoid(x.float())


def fused_beta_sigmoid_bwd(x: torch.Tensor, dy: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Gradient of `fused_beta_sigmoid_fwd` by x, in the dtype of x."""
    s = torch.sigmoid(x.float())
    return (dy.float() * (scale * s * (1 - s))).to(x.dtype)


class _BetaSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return fused_beta_sigmoid_fwd(x, scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return fused_beta_sigmoid_bwd(x, grads[0], ctx.scale), None
