"""Depthwise causal convolution over time, its state, and the `ShortConvolution` module.

`y_t = act(sum_{i<W} weight[:, i] * x_{t-W+1+i} + bias) + residual`, with zeros, or the last inputs in the state, before
the start of each sequence.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu import settings
from fla_npu.dtypes import compute_dtype
from fla_npu.errors import ShapeError
from fla_npu.modules.blockwise import blockwise
from fla_npu.modules.kernels import launch
from fla_npu.ops.checks import sequence_bounds
from fla_npu.ops.utils.second_derivatives import gradients_with_history

ACTIVATIONS = (None, "silu", "swish")
BACKENDS = ("triton", "cuda", "mix")


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Depthwise causal convolution, differentiable in every tensor argument.

    Args:
        x: `[B, T, D]`, or `[B, T, h, d]` with `h * d == D`; any strides.
        weight: `[D, W]`; the last column is the tap of the current token.
        bias: `[D]`.
        residual: shape of x, added after the activation.
        initial_state: `[N, D, W]`, the last W inputs of each sequence, oldest first; only the last W - 1 are used.
        output_final_state: also return that state at the end of each sequence.
        activation: None, `"silu"` or `"swish"` (the same).
        backend: FLA's names `"triton"`, `"cuda"`, `"mix"`; one implementation serves all.
        cu_seqlens: `[N + 1]`, bounds of the sequences packed in x, whose B is then 1.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        chunk_indices: accepted for FLA's sake; nothing here needs them.
        cp_context: must be None, context parallelism is not supported.

    Returns:
        y of x's shape and dtype, and the final state `[N, D, W]` in x's dtype or None. Arithmetic is done in fp32
        (fp64 for fp64 x) and rounded once.

    Raises:
        ShapeError: shapes that do not fit together.
        ValueError: unknown activation or backend, bounds that are none of x's.
        NotImplementedError: `cp_context` is given.
    """
    if cp_context is not None:
        raise NotImplementedError("causal_conv1d does not support context parallelism: pass cp_context=None")
    if backend not in BACKENDS:
        raise ValueError(f"Unsupported backend: {backend!r}, must be one of {BACKENDS}")
    shape = x.shape
    x, residual, weight = _checked(x, residual, weight, bias, activation)
    if x.ndim != 3:
        raise ShapeError(f"x must be [B, T, D], got {tuple(shape)}")
    D, W = weight.shape
    N = _num_sequences(x, cu_seqlens)
    _check_state("initial_state", initial_state, (N, D, W))
    kernels = launch.takes(x, weight, bias, residual, initial_state) and W <= launch.WIDEST_CONVOLUTION
    # A kernel reads the bounds on the device; to read them here would wait for it.
    bounds_matter = not kernels or cu_seqlens_cpu is not None or settings.check_values()
    if cu_seqlens is not None and bounds_matter and not torch.compiler.is_compiling():
        sequence_bounds(cu_seqlens, x.shape[1], cu_seqlens_cpu)
    if kernels:
        from fla_npu.modules.kernels.conv import launch_conv

        y, final_state = launch_conv(
            x, weight, bias, residual, initial_state, activation, cu_seqlens, bool(output_final_state)
        )
        return y.view(shape), final_state

    taps = weight.mT.contiguous()
    y = _convolve(x, residual, taps, bias, activation)
    if W > 1 and x.shape[1] > 0 and (cu_seqlens is not None or initial_state is not None):
        # The taps of the first W - 1 tokens of a sequence reach before its start. Those few rows are computed again
        # from windows that hold what really precedes them.
        heads, index = _heads(x, W - 1, cu_seqlens)
        if initial_state is None:
            context = heads.new_zeros(N, W - 1, D)
        else:
            context = initial_state[..., 1:].mT.to(x.dtype)
        windows = torch.cat([context, heads], dim=1)
        if residual is not None:
            residual_heads = F.pad(_heads(residual, W - 1, cu_seqlens)[0], (0, 0, W - 1, 0))
        else:
            residual_heads = None
        fixed = _convolve(windows, residual_heads, taps, bias, activation)[:, W - 1 :]
        if index is None:
            y[:, : fixed.shape[1]] = fixed
        else:
            rows, inside = index
            y[0].index_copy_(0, rows[inside], fixed[inside])
    final_state = causal_conv1d_update_states(x, W, initial_state, cu_seqlens) if output_final_state else None
    return y.view(shape), final_state


def causal_conv1d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`causal_conv1d` without autograd; the last three are accepted for FLA's sake."""
    with torch.no_grad():
        return causal_conv1d(
            x,
            weight,
            bias,
            residual,
            initial_state,
            output_final_state,
            activation,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
        )


def causal_conv1d_bwd(
    x: torch.Tensor,
    dy: torch.Tensor,
    dht: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `causal_conv1d` from those of its results, dy and dht (or None).

    Returns:
        Of x, weight, bias, residual and initial_state, each with its shape and dtype, or None where that is None. The
        last three arguments are accepted for FLA's sake.
    """
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual, "initial_state": initial_state}
    leaves: dict[str, Any] = {name: None if t is None else t.detach().requires_grad_() for name, t in given.items()}
    with torch.enable_grad():
        y, final_state = causal_conv1d(
            **leaves,
            output_final_state=dht is not None,
            activation=activation,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
        )
    results = [(y, dy)] if dht is None or final_state is None else [(y, dy), (final_state, dht)]
    gradients = iter(
        torch.autograd.grad(
            [result for result, _ in results],
            [leaf for leaf in leaves.values() if leaf is not None],
            [d.to(result.dtype) for result, d in results],
            materialize_grads=True,
        )
    )
    return tuple(None if leaf is None else next(gradients) for leaf in leaves.values())


def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per sequence. Writes the new state into `cache`.

    Args:
        x: one token for each of N sequences, `[N, D]`, `[N, 1, D]` or `[1, N, D]`.
        cache: `[N, D, W]`, the last W inputs of each sequence, oldest first; **updated in place**.
        residual, weight, bias, activation: as in `causal_conv1d`.

    Returns:
        y of x's shape and dtype, and `cache`.

    Raises:
        ShapeError: shapes that do not fit together.
        ValueError: unknown activation.
    """
    shape = x.shape
    x, residual, weight = _checked(x, residual, weight, bias, activation)
    D, W = weight.shape
    if x.ndim not in (2, 3) or (x.ndim == 3 and 1 not in x.shape[:2]):
        raise ShapeError(f"Unsupported input shape: {tuple(shape)}, must be [N, D], [N, 1, D] or [1, N, D]")
    x = x.reshape(-1, D)
    _check_state("cache", cache, (x.shape[0], D, W))
    if launch.takes(x, weight, bias, residual, cache) and W <= launch.WIDEST_CONVOLUTION:
        from fla_npu.modules.kernels.conv import launch_update

        rows = None if residual is None else residual.reshape(-1, D)
        return launch_update(x, weight, bias, rows, cache, activation).view(shape), cache

    dtype = compute_dtype(x)
    state = torch.cat([cache[..., 1:].to(x.dtype), x.unsqueeze(-1)], dim=-1)
    cache.copy_(state)
    y = (state.to(dtype) * weight.to(dtype)).sum(-1)
    if bias is not None:
        y = y + bias
    if activation is not None:
        y = F.silu(y)
    if residual is not None:
        y = y + residual.reshape(-1, D)
    return y.to(x.dtype).view(shape), cache


def causal_conv1d_update_states(
    x: torch.Tensor,
    state_len: int,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last `state_len` inputs of each sequence.

    Args:
        x: `[B, T, D]`; with `cu_seqlens`, `[1, T, D]` or `[T, D]`.
        state_len: W.
        initial_state: `[N, D, W]`, what precedes the sequences; zeros when None.
        cu_seqlens: `[N + 1]`.

    Returns:
        `[N, D, W]`, oldest first, in x's dtype; a new tensor.
    """
    if x.ndim == 2 and cu_seqlens is not None:
        x = x.unsqueeze(0)
    N, T, D = _num_sequences(x, cu_seqlens), x.shape[1], x.shape[2]
    _check_state("initial_state", initial_state, (N, D, state_len))
    if cu_seqlens is None and state_len <= T:
        return x[:, T - state_len :].mT.clone(memory_format=torch.contiguous_format)
    before = x.new_zeros(N, D, state_len) if initial_state is None else initial_state.to(x.dtype)
    if cu_seqlens is None:
        return torch.cat([before[..., T:], x.mT], dim=-1)

    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    column = torch.arange(state_len, device=x.device)
    from_x = ends - state_len + column
    from_state = (column + ends - starts).clamp(max=state_len - 1)
    before = before.gather(2, from_state[:, None].expand(N, D, state_len))
    if T == 0:
        return before
    return torch.where((from_x >= starts)[:, None], x[0][from_x.clamp(min=0)].mT, before).contiguous()


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution with activation and a state for decoding.

    Parameters: `weight` `[D, 1, W]` and, with `bias=True`, `bias` `[D]`.

    Args:
        hidden_size: D.
        kernel_size: W.
        bias: whether there is a bias per channel.
        activation: `"silu"`, `"swish"` or None.
        backend: FLA's `"triton"` or `"cuda"`; one implementation serves both.
        device, dtype: of the parameters.
        **kwargs: ignored, as in FLA.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels=hidden_size,
            out_channels=hidden_size,
            kernel_size=kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        _check_activation(activation)
        if backend not in ("triton", "cuda"):
            raise ValueError(f"Invalid backend: {backend!r}, must be one of ['cuda', 'triton']")
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = backend

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}, backend={self.backend}"

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Convolve x.

        Args:
            x: `[B, T, D]`.
            residual: `[B, T, D]`, added after the activation.
            mask: `[B, T]`, multiplies x; not together with `cu_seqlens`. x itself is left as it is.
            cache: state `[N, D, W]`. With autograd off and exactly one token per sequence it is **updated in
                place**, otherwise it is left as it is.
            output_final_state: also return the new state.
            cu_seqlens: `[N + 1]`, bounds of the sequences packed in x, whose B is then 1.
            chunk_indices, **kwargs: as in `causal_conv1d`.

        Returns:
            y `[B, T, D]` in x's dtype, and the state `[N, D, W]` or None; the state is `cache` itself after an update
            in place.

        Raises:
            ValueError: both mask and cu_seqlens are given; see also `causal_conv1d`.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("`mask` and `cu_seqlens` cannot be provided at the same time")
            x = x * mask.unsqueeze(-1)
        one_token_each = x.shape[1] == (1 if cu_seqlens is None else _num_sequences(x, cu_seqlens))
        if (
            one_token_each
            and not torch.is_grad_enabled()
            and (cu_seqlens is None or bool((cu_seqlens.diff() == 1).all()))
        ):
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return causal_conv1d(
            x=x,
            weight=self.weight.squeeze(1),
            bias=self.bias,
            residual=residual,
            initial_state=cache,
            output_final_state=output_final_state,
            activation=self.activation,
            backend=self.backend,
            cu_seqlens=cu_seqlens,
            chunk_indices=chunk_indices,
            **kwargs,
        )

    def step(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cache: torch.Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One token per sequence: x `[N, 1, D]`, or `[1, N, D]` with `cu_seqlens`. `cache` is updated in place."""
        if cache is None:
            cache = x.new_zeros(_num_sequences(x, cu_seqlens), self.hidden_size, self.kernel_size[0])
        y, cache = causal_conv1d_update(x, cache, residual, self.weight.squeeze(1), self.bias, self.activation)
        return y, cache if output_final_state else None

    @property
    def state_size(self) -> int:
        """Elements of the state of one sequence."""
        return self.hidden_size * self.kernel_size[0]


def _convolve(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """x `[B, T, D]` convolved with taps `[W, D]`, zeros before x."""

    def convolve_block(
        x: torch.Tensor, residual: torch.Tensor | None, taps: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        y = _Taps.apply(x, taps)
        if bias is not None:
            y = y + bias
        if activation is not None:
            y = F.silu(y, inplace=not y.requires_grad)
        return y if residual is None else y + residual

    return blockwise(convolve_block, (x, residual), (taps, bias), lookback=len(taps) - 1)


class _Taps(torch.autograd.Function):
    """`y_t = sum_d taps[W-1-d] * x_{t-d}`, x `[b, t, D]`, taps `[W, D]`.

    Autograd's own backward of these slices copies the whole gradient once per tap: three times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, taps)
        y = x * taps[-1]
        for delay in range(1, min(len(taps), x.shape[1])):
            y[:, delay:].addcmul_(x[:, :-delay], taps[-1 - delay])
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, taps = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradients_with_history(_delayed_sum, (x, taps), ctx.needs_input_grad, dy)
        need_x, need_taps = ctx.needs_input_grad
        dx, dtaps = dy * taps[-1] if need_x else None, torch.zeros_like(taps) if need_taps else None
        for delay in range(min(len(taps), x.shape[1])):
            if dx is not None and delay:
                dx[:, :-delay].addcmul_(dy[:, delay:], taps[-1 - delay])
            if dtaps is not None:
                dtaps[-1 - delay] = (dy[:, delay:] * x[:, : x.shape[1] - delay]).sum((0, 1))
        return dx, dtaps


def _delayed_sum(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """What `_Taps` computes, without writing in place."""
    T = x.shape[1]
    delayed = [F.pad(x[:, : T - d], (0, 0, d, 0)) * taps[-1 - d] for d in range(max(1, min(len(taps), T)))]
    return torch.stack(delayed).sum(0)


def _heads(
    x: torch.Tensor, length: int, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The first tokens of each sequence, `[N, length, D]`, fewer for a short batch.

    For packed sequences also where they come from: rows `[N, length]` of `x[0]`, and which of those are inside their
    sequence. The others repeat some row of x.
    """
    if cu_seqlens is None:
        return x[:, :length], None
    rows = cu_seqlens[:-1, None].long() + torch.arange(length, device=x.device)
    inside = rows < cu_seqlens[1:, None]
    return x[0][rows.clamp(max=x.shape[1] - 1)], (rows, inside)


def _checked(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x and residual with their heads flattened, and the weight."""
    _check_activation(activation)
    if weight is None:
        raise ShapeError("weight is required: [D, W]")
    if weight.ndim != 2:
        raise ShapeError(f"weight must be [D, W], got {tuple(weight.shape)}")
    D = weight.shape[0]
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
    if x.ndim == 4 and x.shape[-1] != D:
        x = x.flatten(2)
        residual = None if residual is None else residual.flatten(2)
    if x.shape[-1] != D:
        raise ShapeError(f"x has {x.shape[-1]} channels but weight {tuple(weight.shape)} has {D}")
    if bias is not None and bias.shape != (D,):
        raise ShapeError(f"bias must be [{D}], got {tuple(bias.shape)}")
    return x, residual, weight


def _check_activation(activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        raise ShapeError(f"Activation {activation!r} is not supported, must be one of {ACTIVATIONS}")


def _check_state(name: str, state: torch.Tensor | None, shape: tuple[int, int, int]) -> None:
    if state is not None and state.shape != shape:
        raise ShapeError(f"{name} must be [N, D, W] = {list(shape)}, got {list(state.shape)}")


def _num_sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    if cu_seqlens is None:
        return x.shape[0]
    if x.shape[0] != 1:
        raise ShapeError(f"packed sequences (cu_seqlens) need a batch size of 1, got {x.shape[0]}")
    return len(cu_seqlens) - 1
