"""Whether a call of a module runs as a kernel. Needs no triton; the kernels are imported when the first call does."""

from functools import lru_cache
from importlib.util import find_spec

import torch

from fla_npu.planner.chips import chip

WIDEST_CONVOLUTION = 8
"""Taps of a convolution are unrolled."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the kernels take a call with these tensors: those of a supported NPU, without gradients.

    Autograd, `torch.compile`, float64 and every other device get the portable code.
    """
    tensors = [x, *(t for t in others if t is not None)]
    return (
        runs_kernels(x.device)
        and not torch.compiler.is_compiling()
        and all(t.dtype in DTYPES and t.device == x.device for t in tensors)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device."""
    return device.type == "npu" and _npu_runs_kernels(device.index or 0)


@lru_cache(maxsize=16)
def _npu_runs_kernels(index: int) -> bool:
    if not hasattr(torch, "npu") or find_spec("triton") is None:
        return False
    try:
        return chip(torch.npu.get_device_name(index)).triton
    except ValueError:  # a chip that we know nothing of
        return False
