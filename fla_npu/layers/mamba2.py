"""The Mamba-2 layer."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.layers.linear_attention import ACTIVATIONS, TokenMixer
from fla_npu.layers.undecayed import UndecayedParameters
from fla_npu.modules.causal_conv1d import causal_conv1d
from fla_npu.modules.layernorm_gated import RMSNormGated
from fla_npu.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

CONVOLVED = ("silu", "swish")
"""Activations that the convolution applies itself."""


class Mamba2(UndecayedParameters, TokenMixer):
    """Mamba-2, https://arxiv.org/abs/2405.21060: linear attention with one decay per head, in which C are queries, B
    keys and x, times its time step, values.

    With `a = -exp(A_log)`, per head, after a projection and a short convolution of x, B and C:

        dt = softplus(dt + dt_bias);  S = exp(dt a) S + dt B x^T;  y = S^T C + D x

    Args:
        num_heads: of x, `expand * hidden_size / head_dim`, which it also is when None or 0.
        head_dim: channels of a head of x.
        hidden_size: of input and output.
        state_size: channels of B and C.
        expand: channels of x over `hidden_size`.
        n_groups: heads of B and C; each serves `num_heads / n_groups` heads of x that lie next to each other.
        conv_kernel, use_conv_bias: of the convolution.
        conv_init: its initial weights are uniform up to this; torch's own when None.
        hidden_act: activation after the convolution and, without `rmsnorm`, of the output's gate.
        A_init_range: initial `exp(A_log)` are uniform in it.
        D_has_hdim: one D per channel of x instead of one per head.
        rmsnorm: normalise the output by groups.
        norm_before_gate: order of norm and gate.
        dt_min, dt_max, dt_init_floor: initial time steps are log-uniform between the first two, at least the third.
        dt_limit: time steps are kept between these.
        use_bias: of the projections.
        norm_eps: of the norm.
        chunk_size: accepted for FLA's sake, the op chooses its chunks.
        layer_idx: of the layer's states in a cache.
        backend: FLA's names `"cuda"` and `"triton"` of convolutions; one implementation serves both.

    FLA's torch code gives head j of x the group `j % n_groups` in a prefill, but `j // (num_heads / n_groups)` in
    decoding and in its CUDA kernels; here it is the latter throughout. FLA's layer does not know of packed sequences
    either, decodes one token at a time only, and decays its states at padding on the right.

    Raises:
        ValueError: sizes that do not fit together; unknown activation.
        ShapeError: unknown backend.
    """

    undecayed = ("dt_bias", "A_log", "D")

    def __init__(
        self,
        num_heads: int | None = None,
        head_dim: int = 64,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: int = 2,
        n_groups: int = 1,
        conv_kernel: int = 4,
        conv_init: float | None = None,
        use_conv_bias: bool = True,
        hidden_act: str = "silu",
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = 256,
        layer_idx: int | None = None,
        backend: str = "cuda",
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.expand = expand
        self.intermediate_size = int(expand * hidden_size)
        self.head_dim = head_dim
        self.ssm_state_size = state_size
        self.n_groups = n_groups
        self.num_heads = num_heads or self.intermediate_size // head_dim
        if self.num_heads * head_dim != self.intermediate_size:
            raise ValueError(
                f"num_heads * head_dim must be expand * hidden_size = {self.intermediate_size}, "
                f"got num_heads={self.num_heads} and head_dim={head_dim}"
            )
        if n_groups < 1 or self.num_heads % n_groups:
            raise ValueError(f"num_heads={self.num_heads} must be divisible by n_groups={n_groups}")
        if hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {sorted(ACTIVATIONS)}, got {hidden_act!r}")
        if backend not in ("cuda", "triton"):
            raise ShapeError(f"backend must be 'cuda' or 'triton', got {backend!r}")
        self.conv_kernel_size = conv_kernel
        self.conv_init = conv_init
        self.use_conv_bias = use_conv_bias
        self.activation = hidden_act
        self.act = ACTIVATIONS[hidden_act]
        self.A_init_range = A_init_range
        self.D_has_hdim = D_has_hdim
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.norm_eps = norm_eps
        self.chunk_size = chunk_size
        self.dt_limit = dt_limit
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.dt_init_floor = dt_init_floor
        self.use_bias = use_bias
        self.layer_idx = layer_idx
        self.backend = backend
        self.conv1d = nn.Conv1d(
            self.conv_dim,
            self.conv_dim,
            conv_kernel,
            groups=self.conv_dim,
            padding=conv_kernel - 1,
            bias=use_conv_bias,
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        projected = self.intermediate_size + self.conv_dim + self.num_heads
        self.in_proj = nn.Linear(hidden_size, projected, bias=use_bias)
        self.dt_bias = nn.Parameter(self.initial_dt_bias())
        self.A_log = nn.Parameter(self.initial_A_log())
        self.norm: RMSNormGated | None = None
        if rmsnorm:
            self.norm = RMSNormGated(
                self.intermediate_size,
                eps=norm_eps,
                norm_before_gate=norm_before_gate,
                group_size=self.intermediate_size // n_groups,
            )
        self.D = nn.Parameter(torch.ones(self.intermediate_size if D_has_hdim else self.num_heads))
        self.out_proj = nn.Linear(self.intermediate_size, hidden_size, bias=use_bias)

    @property
    def conv_dim(self) -> int:
        """Channels that are convolved: of x, B and C."""
        return self.intermediate_size + 2 * self.n_groups * self.ssm_state_size

    def initial_dt_bias(self) -> torch.Tensor:
        """`[num_heads]`: the inverse softplus of the initial time steps."""
        low, high = math.log(self.dt_min), math.log(self.dt_max)
        dt = torch.exp(torch.rand(self.num_heads) * (high - low) + low).clamp(min=self.dt_init_floor)
        return dt + torch.log(-torch.expm1(-dt))

    def initial_A_log(self) -> torch.Tensor:
        """`[num_heads]`, fp32."""
        return torch.empty(self.num_heads, dtype=torch.float32).uniform_(*self.A_init_range).log()

    def mix(
        self,
        mode: str,
        hidden_states: torch.Tensor,
        last_state: dict[str, Any] | None,
        use_cache: bool,
        cu_seqlens: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        gate, xBC, dt = self.in_proj(hidden_states).split(
            [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1
        )
        xBC, conv_state = causal_conv1d(
            xBC,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            initial_state=None if last_state is None else last_state["conv_state"],
            output_final_state=use_cache,
            activation=self.activation if self.activation in CONVOLVED else None,
            cu_seqlens=cu_seqlens,
        )
        if self.activation not in CONVOLVED:
            xBC = self.act(xBC)
        y, recurrent_state = self._scan(
            chunk_simple_gla if mode == "chunk" else fused_recurrent_simple_gla,
            xBC,
            dt,
            initial_state=None if last_state is None else last_state["recurrent_state"],
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
        )
        y = y * self.act(gate) if self.norm is None else self.norm(y, gate)
        o = self.out_proj(y.to(hidden_states.dtype))
        return o, {"recurrent_state": recurrent_state, "conv_state": conv_state}

    def _scan(
        self, op: Callable[..., Any], xBC: torch.Tensor, dt: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """y `[B, T, intermediate]` in fp32 (fp64 for fp64 inputs) from x, B and C `[B, T, conv_dim]` and the logits of
        time steps `[B, T, num_heads]`, and the states `[N, num_heads, head_dim, state_size]`; by `op`, one of simple
        GLA's, with these options."""
        dtype = compute_dtype(xBC)
        grouped = self.n_groups * self.ssm_state_size
        x, B, C = xBC.to(dtype).split([self.intermediate_size, grouped, grouped], dim=-1)
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.dt_limit)
        y, state = op(
            q=C.unflatten(-1, (self.n_groups, -1)),
            k=B.unflatten(-1, (self.n_groups, -1)),
            v=x * dt[..., None],
            g=-dt * self.A_log.to(dtype).exp(),
            scale=1.0,
            state_v_first=True,
            **options,
        )
        return (y + self.D.to(dtype).view(self.num_heads, -1) * x).flatten(-2), state
