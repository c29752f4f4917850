"""What rounding a result to a dtype costs."""

import torch

ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""Largest relative error; float32 is what the kernels compute in. The interpreter cuts bfloat16 off, the device rounds
it, which would be 2^-8."""
