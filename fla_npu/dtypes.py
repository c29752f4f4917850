"""The precision of arithmetic."""

import torch


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """In which the arithmetic on x is done: float32, and float64 for float64 (numeric checks of gradients)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
