"""Softplus under FLA's names, where it is a function of Triton's for use within kernels; here it takes tensors."""

import math

import torch
import torch.nn.functional as F

from fla_npu.ops.common.gate import SOFTPLUS_THRESHOLD


def softplus(x: torch.Tensor) -> torch.Tensor:
    """`log(1 + exp(x))`, and x itself from 20 on, where they agree to rounding. Shape and dtype of x."""
    return F.softplus(x, threshold=SOFTPLUS_THRESHOLD)


def softplus2(x: torch.Tensor) -> torch.Tensor:
    """`log2(1 + 2^x)`, the softplus of logits and results in binary logarithms. Shape and dtype of x."""
    return F.softplus(x, beta=math.log(2), threshold=SOFTPLUS_THRESHOLD)
