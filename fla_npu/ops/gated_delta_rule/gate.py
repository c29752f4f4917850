"""The gate of Gated DeltaNet: one log decay per value head, `-exp(A_log) * softplus(g + dt_bias)`.

FLA's names over `fla_npu.ops.common.gate`, which has the formula. `g` is `[..., HV]`; `A_log` and `dt_bias` have `HV`
elements. All arithmetic is float32. Wrong shapes raise `ShapeError`.
"""

import torch

from fla_npu.ops.checks import gate_parameter
from fla_npu.ops.common.gate import fused_gate, fused_gate_gradients, gate_forward
from fla_npu.ops.utils.cumsum import chunk_local_cumsum


def _parameters(
    g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    heads = g.shape[-1]
    A_log = gate_parameter("A_log", A_log, "HV", heads, g.device)
    return A_log, None if dt_bias is None else gate_parameter("dt_bias", dt_bias, "HV", heads, g.device)


def naive_gdn_gate(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The gate as plain differentiable PyTorch, `[..., HV]` in `output_dtype`."""
    A_log, dt_bias = _parameters(g, A_log, dt_bias)
    bias = None if dt_bias is None else dt_bias.float()
    return gate_forward(g.float(), A_log.float().exp(), bias, "softplus").to(output_dtype)


def fused_gdn_gate(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The gate, differentiable, keeping only its inputs for the backward pass; `[..., HV]` in `output_dtype`."""
    A_log, dt_bias = _parameters(g, A_log, dt_bias)
    return fused_gate(g, A_log, dt_bias, None, output_dtype)


def gdn_gate_fwd(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`fused_gdn_gate` outside autograd."""
    with torch.no_grad():
        return fused_gdn_gate(g, A_log, dt_bias, output_dtype)


def gdn_gate_bwd(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dyg: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`(dg, dA_log, ddt_bias)` for the gradient `dyg` of the gate, in the shapes and dtypes of the inputs."""
    with torch.no_grad():
        flat_A_log, flat_bias = _parameters(g, A_log, dt_bias)
        dg, d_a_log, d_bias = fused_gate_gradients(g, flat_A_log, flat_bias, None, dyg)
    assert d_a_log is not None
    return dg, d_a_log.view_as(A_log), None if dt_bias is None or d_bias is None else d_bias.view_as(dt_bias)


def gdn_gate_chunk_cumsum(
    g: torch.Tensor,
    A_log: torch.Tensor,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> torch.Tensor:
    """The gate of `g` `[B,T,HV]`, summed up within every chunk and multiplied by `scale`."""
    return chunk_local_cumsum(
        gdn_gate_fwd(g, A_log, dt_bias),
        chunk_size,
        scale=scale,
        cu_seqlens=cu_seqlens,
        output_dtype=output_dtype or g.dtype,
        chunk_indices=chunk_indices,
    )
