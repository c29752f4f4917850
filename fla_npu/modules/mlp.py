"""The gated feed-forward network of FLA's models."""

from typing import Any

import torch
import torch.nn as nn

from fla_npu.modules.activations import powglu, swiglu, swiglu_linear


class GatedMLP(nn.Module):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`, projections without biases.

    Args:
        hidden_size: of input and output.
        hidden_ratio: the inner size is 2/3 of `hidden_ratio * hidden_size`, rounded up to a multiple of 256; 4 when
            None.
        intermediate_size: the inner size itself.
        hidden_act: `"swish"`, or `"powlu"`, the gate of `powglu`.
        fuse_swiglu: accepted for FLA's sake, the result is the same.
        powglu_power: only read with `"powlu"`.

    Raises:
        ValueError: unknown `hidden_act`.
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: int | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        fuse_swiglu: bool = True,
        powglu_power: float = 3.0,
    ) -> None:
        super().__init__()
        if hidden_act not in ("swish", "powlu"):
            raise ValueError(f"Unsupported hidden_act: {hidden_act!r}, must be 'swish' or 'powlu'")
        self.hidden_size = hidden_size
        self.hidden_ratio = 4 if hidden_ratio is None else hidden_ratio
        if intermediate_size is None:
            intermediate_size = -(-int(hidden_size * self.hidden_ratio * 2 / 3) // 256) * 256
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.fuse_swiglu = fuse_swiglu
        self.powglu_power = powglu_power
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """x `[..., hidden_size]`; other keyword arguments are ignored, as in FLA."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(swiglu(gate, up) if self.hidden_act == "swish" else powglu(gate, up, self.powglu_power))


class SwiGLULinear(nn.Module):
    """`swiglu_linear` as a module without parameters."""

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x and y `[..., D]`, weight `[D', D]`, bias `[D']`."""
        return swiglu_linear(x, y, weight, bias)
