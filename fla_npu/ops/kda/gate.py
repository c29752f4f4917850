"""The gates of Kimi Delta Attention: one log decay per value head and key channel.

    -exp(A_log) * softplus(g + dt_bias)                    without lower_bound
    lower_bound * sigmoid(exp(A_log) * (g + dt_bias))      with lower_bound; A_log=None leaves the factor out

FLA's names over `fla_npu.ops.common.gate`, which has the formulas. `g` is `[..., HV, K]`, `A_log` has `HV` elements,
`dt_bias` `HV*K`. All arithmetic is float32. Wrong shapes raise `ShapeError`.
"""

from typing import Any

import torch

from fla_npu.errors import ShapeError
from fla_npu.ops.checks import gate_parameter
from fla_npu.ops.common.gate import fused_gate, fused_gate_gradients, gate_forward
from fla_npu.ops.utils.cumsum import chunk_local_cumsum


def _parameters(
    g: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`A_log` as `[HV,1]` and `dt_bias` as `[HV,K]`."""
    if g.ndim < 2:
        raise ShapeError(f"g must have shape [..., HV, K], got {list(g.shape)}")
    if A_log is None and lower_bound is None:
        raise ValueError("`A_log` must be provided when `lower_bound` is not set")
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"`lower_bound` must be negative, got {lower_bound}")
    heads, key_dim = g.shape[-2:]
    if A_log is not None:
        A_log = gate_parameter("A_log", A_log, "HV", heads, g.device).view(heads, 1)
    if dt_bias is not None:
        dt_bias = gate_parameter("dt_bias", dt_bias, "HV*K", heads * key_dim, g.device).view(heads, key_dim)
    return A_log, dt_bias


def _naive(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    A_log, dt_bias = _parameters(g, A_log, dt_bias, lower_bound)
    a = None if A_log is None else A_log.float().exp()
    bias = None if dt_bias is None else dt_bias.float()
    kind = "softplus" if lower_bound is None else "bounded"
    return gate_forward(g.float(), a, bias, kind, lower_bound).to(output_dtype)


def naive_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The softplus gate as plain differentiable PyTorch, `[..., HV, K]` in `output_dtype`."""
    return _naive(g, A_log, dt_bias, None, output_dtype)


def naive_kda_lowerbound_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The bounded gate as plain differentiable PyTorch, `[..., HV, K]` in `output_dtype`."""
    return _naive(g, A_log, dt_bias, lower_bound, output_dtype)


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | int | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
    *,
    g_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gate, differentiable, keeping only its inputs for the backward pass; `[..., HV, K]` in `output_dtype`.

    Remote code of published checkpoints calls an older form, `fused_kda_gate(g, A_log, head_dim, g_bias=dt_bias)`
    with `g` `[..., HV*K]`: an int in the place of `dt_bias` is that head dimension.
    """
    if isinstance(dt_bias, int):
        g, dt_bias = g.unflatten(-1, (-1, dt_bias)), None
    if g_bias is not None:
        if dt_bias is not None:
            raise ValueError("pass `dt_bias` or its old name `g_bias`, not both")
        dt_bias = g_bias
    A_log, bias = _parameters(g, A_log, dt_bias, lower_bound)
    return fused_gate(g, A_log, bias, lower_bound, output_dtype)


def kda_gate_fwd(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`fused_kda_gate` outside autograd."""
    with torch.no_grad():
        return fused_kda_gate(g, A_log, dt_bias, lower_bound, output_dtype)


def kda_gate_bwd(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dyg: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`(dg, dA_log, ddt_bias)` for the gradient `dyg` of the gate, in the shapes and dtypes of the inputs."""
    if dyg is None:
        raise TypeError("dyg, the gradient of the gate, must be a torch.Tensor, got None")
    with torch.no_grad():
        shaped_A_log, shaped_bias = _parameters(g, A_log, dt_bias, lower_bound)
        dg, d_a_log, d_bias = fused_gate_gradients(g, shaped_A_log, shaped_bias, lower_bound, dyg)
    return (
        dg,
        None if A_log is None or d_a_log is None else d_a_log.view_as(A_log),
        None if dt_bias is None or d_bias is None else d_bias.view_as(dt_bias),
    )


def kda_gate_chunk_cumsum(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: torch.Tensor | None = None,
    lower_bound: float | None = None,
    use_graph: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """The gate of `g` `[B,T,HV,K]`, summed up within every chunk and multiplied by `scale`.

    `use_graph` and further keywords are accepted for FLA's sake and change nothing.
    """
    return chunk_local_cumsum(
        kda_gate_fwd(g, A_log, dt_bias, lower_bound),
        chunk_size,
        scale=scale,
        cu_seqlens=cu_seqlens,
        output_dtype=output_dtype or g.dtype,
        chunk_indices=chunk_indices,
    )
