"""Whether a call of a module runs as a kernel. Needs no triton; the kernels are imported when the first call does."""

import torch

from fla_npu.ops.dispatch import requested
from fla_npu.ops.kernels import Device, device_refusal

WIDEST_CONVOLUTION = 8
"""Taps of a convolution are unrolled."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the kernels take a call with these tensors: those of a supported NPU, without gradients.

    Autograd, `torch.compile`, float64, lazy negation and every other device get the portable code.
    """
    tensors = [x, *(t for t in others if t is not None)]
    return (
        # First: what follows it would break the graph.
        not torch.compiler.is_compiling()
        and runs_kernels(x.device)
        and all(t.dtype in DTYPES and t.device == x.device and not t.is_neg() for t in tensors)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: where they can, unless `FLA_NPU_IMPL` or `use_implementation` asks for
    another implementation."""
    asked = requested()
    if asked not in ("auto", "triton"):
        return False
    return device_refusal(Device(device.type, device.index or 0), asked=asked == "triton") is None
