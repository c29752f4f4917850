"""A penalty on each token's largest logit that exists as a gradient only."""

from typing import Any

import torch

from fla_npu.ops.utils.second_derivatives import first_derivatives_only


class L2Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, logits: torch.Tensor, l2_penalty_factor: float = 1e-4) -> torch.Tensor:
        largest, place = logits.max(-1, keepdim=True)
        ctx.save_for_backward(largest * (l2_penalty_factor / (logits.shape[0] * logits.shape[1])), place)
        ctx.shape = logits.shape
        return loss.view_as(loss)

    @staticmethod
    @first_derivatives_only("l2_warp, whose penalty is a gradient alone,")
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        pull, place = ctx.saved_tensors
        return dloss, pull.new_zeros(ctx.shape).scatter_(-1, place, (pull * dloss).to(pull.dtype)), None


def l2_warp(loss: torch.Tensor, logits: torch.Tensor, l2_penalty_factor: float = 1e-4) -> torch.Tensor:
    """`loss`, a scalar, unchanged; its gradient pulls the largest logit of every token `[B, T, V]` towards 0, as
    `l2_penalty_factor / 2` times the mean of their squares would. Second derivatives raise a RuntimeError."""
    return L2Wrap.apply(loss, logits, l2_penalty_factor)
