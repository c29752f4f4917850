"""The two functions of the package `causal_conv1d`, under its signatures, for code that imports that name.

transformers' layers reach the same functions by `fla_npu.enable()`, also for the packed sequences that their own
convolution mixes.
"""

import torch
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.modules.causal_conv1d import causal_conv1d
from fla_npu.modules.causal_conv1d import causal_conv1d_update as one_token
from fla_npu.utils import tensor_cache


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal convolution over the last axis, differentiable in x, weight, bias and initial_states.

    Args:
        x: `[B, C, T]`, any strides; channels last is fastest.
        weight: `[C, W]`; the last column is the tap of the current token.
        bias: `[C]`.
        seq_idx: `[B, T]`; a change of value starts a new sequence.
        initial_states: `[B, C, W - 1]`, the inputs before the first token; not together with packed sequences.
        return_final_states: also return the last W - 1 inputs.
        final_states_out: `[B, C, W - 1]`, receives them; needs `return_final_states`.
        activation: None, `"silu"` or `"swish"`.
        cu_seq_lens_q: `[N + 1]`, bounds of the sequences packed in x, whose B is then 1: how transformers names them.
            Counts when seq_idx is None. Where x has more columns than the sequences have tokens, the first ones are
            the context of the first sequence.

    Returns:
        y of x's shape and dtype, and with `return_final_states` the states `[B, C, W - 1]` in x's dtype.

    Raises:
        ValueError: shapes or options that do not fit together.
    """
    if x.ndim != 3 or weight.ndim != 2:
        raise ShapeError(f"x must be [B, C, T] and weight [C, W], got {list(x.shape)} and {list(weight.shape)}")
    states_shape = (x.shape[0], x.shape[1], weight.shape[1] - 1)
    for name, states in (("initial_states", initial_states), ("final_states_out", final_states_out)):
        if states is not None and states.shape != states_shape:
            raise ShapeError(f"{name} must be [B, C, W - 1] = {list(states_shape)}, got {list(states.shape)}")
    if final_states_out is not None and not return_final_states:
        raise ValueError("final_states_out needs return_final_states=True")
    bounds = None
    if seq_idx is not None:
        bounds = _bounds(seq_idx, x.shape[0], x.shape[2])
    elif cu_seq_lens_q is not None:
        bounds = _shifted(cu_seq_lens_q, x.shape[2])
    if bounds is None:
        state = None if initial_states is None else F.pad(initial_states, (1, 0))
        y, last = causal_conv1d(
            x.mT, weight, bias, initial_state=state, output_final_state=return_final_states, activation=activation
        )
    elif initial_states is not None or return_final_states:
        raise ValueError("initial_states and return_final_states are not available with packed sequences")
    else:
        rows = x.mT.reshape(1, x.shape[0] * x.shape[2], x.shape[1])
        y, last = causal_conv1d(rows, weight, bias, activation=activation, cu_seqlens=bounds)
        y = y.view(x.shape[0], x.shape[2], x.shape[1])
    if last is None:
        return y.mT
    states = last[..., 1:]
    return y.mT, states if final_states_out is None else final_states_out.copy_(states)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The next tokens of sequences whose last inputs are in `conv_state`, which is **updated in place**.

    Args:
        x: `[B, C]` or `[B, C, T]`.
        conv_state: `[B, C, S]` with S of at least W - 1: the last S inputs, oldest first.
        weight, bias, activation: as in `causal_conv1d_fn`.
        cache_seqlens: `[B]`, integers; conv_state is a ring then, in which this is the place of the next token (modulo
            S). T may be larger than S.
        conv_state_indices: `[B]`, integers; conv_state is a pool `[slots, C, S]` then, and these are the slots of the
            sequences, each of them once. Where negative, y is 0 and no state changes.

    Returns:
        y of x's shape and dtype.

    Raises:
        ValueError: shapes that do not fit together.
        IndexError: a slot beyond the pool.
    """
    if x.ndim not in (2, 3) or weight.ndim != 2:
        raise ShapeError(f"x must be [B, C] or [B, C, T] and weight [C, W], got {list(x.shape)}, {list(weight.shape)}")
    tokens = x.unsqueeze(-1) if x.ndim == 2 else x
    (rows, channels, count), width, length = tokens.shape, weight.shape[1], conv_state.shape[-1]
    for name, integers in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if integers is not None and (integers.shape != (rows,) or integers.dtype not in (torch.int32, torch.int64)):
            raise ShapeError(f"{name} must be integers [{rows}], got {integers.dtype} {list(integers.shape)}")
    slots = rows if conv_state_indices is None else conv_state.shape[0]
    if conv_state.shape != (slots, channels, length) or length < width - 1:
        raise ShapeError(
            f"conv_state must be [{'slots' if conv_state_indices is not None else rows}, {channels}, S] with S of at "
            f"least {width - 1}, got {list(conv_state.shape)}"
        )
    if conv_state_indices is not None:
        used = conv_state_indices >= 0
        chosen = conv_state_indices[used].long()
        states, y = conv_state[chosen], torch.zeros_like(x)
        places = None if cache_seqlens is None else cache_seqlens[used]
        y[used] = causal_conv1d_update(x[used], states, weight, bias, activation, places)
        conv_state[chosen] = states
        return y
    if cache_seqlens is None and count == 1 and length == width:
        y, _ = one_token(tokens.mT, conv_state, weight=weight, bias=bias, activation=activation)
        return y.mT.reshape(x.shape)
    before = conv_state
    if cache_seqlens is not None:
        steps = torch.arange(1 - width, count, device=x.device)
        ring = ((cache_seqlens[:, None] + steps) % length)[:, None].expand(-1, channels, -1)
        before = conv_state.gather(2, ring[..., : width - 1])
    inputs = torch.cat([before.to(x.dtype), tokens], dim=-1)
    y, _ = causal_conv1d(inputs.mT, weight, bias, activation=activation)
    if cache_seqlens is None:
        conv_state.copy_(inputs[..., inputs.shape[-1] - length :])
    else:
        # The tokens that the ring still holds afterwards: a place is written once.
        conv_state.scatter_(2, ring[..., width - 1 :][..., -length:], tokens[..., -length:].to(conv_state.dtype))
    return y.mT[..., before.shape[-1] :].reshape(x.shape)


@tensor_cache
def _bounds(seq_idx: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`cu_seqlens` of the rows of `seq_idx` `[B, T]` one after the other.

    Raises:
        ShapeError: `seq_idx` has another number of rows, or more columns than there are tokens.
    """
    if seq_idx.ndim != 2 or seq_idx.shape[0] != rows or seq_idx.shape[1] > columns:
        raise ShapeError(f"seq_idx must be [{rows}, {columns}], got {list(seq_idx.shape)}")
    if rows * columns == 0:
        return torch.zeros(2, dtype=torch.long, device=seq_idx.device)
    starts = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (columns - seq_idx.shape[1] + 1, 0))
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=rows * columns)


@tensor_cache
def _shifted(cu_seqlens: torch.Tensor, columns: int) -> torch.Tensor:
    """`cu_seqlens` after the context that precedes the first sequence."""
    context = columns - int(cu_seqlens[-1])
    return torch.cat([cu_seqlens[:1], cu_seqlens[1:] + context]) if context > 0 else cu_seqlens
