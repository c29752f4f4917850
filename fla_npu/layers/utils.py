"""Padded batches to packed sequences and back, and a layer's entry in the state cache."""

from typing import Any

import torch
import torch.nn as nn

from fla_npu.errors import ShapeError
from fla_npu.ops.utils import prepare_cu_seqlens_from_lens, prepare_lens_from_mask
from fla_npu.utils import tensor_cache


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` `[M]` of x `[N, ...]`, `[M, ...]`; differentiable."""
    return x.index_select(0, indices)


def index_put_first_axis(x: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """A tensor `[first_axis_dim, ...]` with the rows x `[M, ...]` at `indices` `[M]` and zeros elsewhere."""
    return x.new_zeros(first_axis_dim, *x.shape[1:]).index_copy_(0, indices.long(), x)


@tensor_cache
def get_unpad_indices_and_cu(
    attention_mask: torch.Tensor, q_len: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`get_unpad_data` without the maximum length, of the last `q_len` columns of the mask."""
    if q_len is not None:
        attention_mask = attention_mask[:, attention_mask.shape[1] - q_len :]
    indices = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    return indices, prepare_cu_seqlens_from_lens(prepare_lens_from_mask(attention_mask))


@tensor_cache
def get_unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Where the tokens of a padded batch are.

    Args:
        attention_mask: `[B, T]`, bool or 0 / 1.

    Returns:
        The indices of the tokens in the flattened batch, int64; their `cu_seqlens`, int32 `[B + 1]`; and the longest
        length.
    """
    indices, cu_seqlens = get_unpad_indices_and_cu(attention_mask)
    return indices, cu_seqlens, int(cu_seqlens.diff().max())


@tensor_cache
def has_padding(attention_mask: torch.Tensor, q_len: int) -> bool:
    """Whether the last `q_len` columns of the mask have a zero."""
    return not bool(attention_mask[:, attention_mask.shape[1] - q_len :].all())


def unpad_hidden_states(
    hidden_states: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    q_len: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """A padded batch as packed sequences, unless `cu_seqlens` says that it is packed or there is no mask.

    Args:
        hidden_states: `[B, q_len, ...]`.
        cu_seqlens: `[N + 1]` or None.
        attention_mask: `[B, T]`, bool or 0 / 1, or None; its last `q_len` columns count.
        q_len: tokens per row.

    Returns:
        hidden_states `[1, total, ...]`, the indices for `repad_hidden_states`, and their `cu_seqlens`; or
        hidden_states as they are, None, and the given `cu_seqlens`.
    """
    if cu_seqlens is not None or attention_mask is None:
        return hidden_states, None, cu_seqlens
    indices, cu_seqlens = get_unpad_indices_and_cu(attention_mask, q_len)
    return index_first_axis(hidden_states.flatten(0, 1), indices).unsqueeze(0), indices, cu_seqlens


def repad_hidden_states(
    hidden_states: torch.Tensor, indices: torch.Tensor | None, batch_size: int, q_len: int
) -> torch.Tensor:
    """The inverse of `unpad_hidden_states`: `[batch_size, q_len, ...]`, zeros at the padding."""
    if indices is None:
        return hidden_states
    return pad_input(hidden_states.squeeze(0), indices, batch_size, q_len)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch_size: int, seq_len: int) -> torch.Tensor:
    """`[batch_size, seq_len, ...]` with the rows of `[total, ...]` at the flat positions `indices`, zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch_size * seq_len).unflatten(0, (batch_size, seq_len))


def unpad_input(
    q: torch.Tensor | tuple[torch.Tensor, ...],
    states: tuple[torch.Tensor, ...],
    attention_mask: torch.Tensor,
    q_len: int,
    keepdim: bool = False,
) -> tuple[
    torch.Tensor | tuple[torch.Tensor, ...],
    tuple[torch.Tensor, ...],
    torch.Tensor,
    tuple[torch.Tensor, torch.Tensor],
    tuple[int, int],
]:
    """Queries and states of a padded batch as packed sequences.

    Args:
        q: `[B, q_len, ...]`, or a tuple of such.
        states: tensors `[B, T, ...]`.
        attention_mask: `[B, T]`, bool or 0 / 1.
        q_len: T (prefill) or 1 (decoding: every row has its one query).
        keepdim: return `[1, total, ...]` rather than `[total, ...]`.

    Returns:
        q, states, the indices of q for `pad_input`, `cu_seqlens` of q and of the states, and their longest lengths.

    Raises:
        NotImplementedError: any other `q_len`.
    """
    indices_k, cu_seqlens_k, max_k = get_unpad_data(attention_mask)
    batch_size, seq_len = states[0].shape[:2]
    queries = (q,) if isinstance(q, torch.Tensor) else q
    states = tuple(index_first_axis(s.flatten(0, 1), indices_k) for s in states)
    if q_len == seq_len:
        queries = tuple(index_first_axis(x.flatten(0, 1), indices_k) for x in queries)
        indices_q, cu_seqlens_q, max_q = indices_k, cu_seqlens_k, max_k
    elif q_len == 1:
        queries = tuple(x.squeeze(1) for x in queries)
        cu_seqlens_q = torch.arange(batch_size + 1, dtype=torch.int32, device=queries[0].device)
        indices_q, max_q = cu_seqlens_q[:-1], 1
    else:
        raise NotImplementedError(
            f"We only support either q_len == k_len (prefilling) or q_len == 1 (decoding), got {q_len} and {seq_len}"
        )
    if keepdim:
        queries = tuple(x.unsqueeze(0) for x in queries)
        states = tuple(s.unsqueeze(0) for s in states)
    unpadded = queries[0] if isinstance(q, torch.Tensor) else queries
    return unpadded, states, indices_q, (cu_seqlens_q, cu_seqlens_k), (max_q, max_k)


def check_attention_mask(attention_mask: torch.Tensor, batch_size: int, q_len: int) -> None:
    """Raise ShapeError unless the mask is `[batch_size, T]` with `T >= q_len`."""
    shape = attention_mask.shape
    if len(shape) != 2 or shape[0] != batch_size or shape[1] < q_len:
        raise ShapeError(
            "Expected attention_mask as a 0-1 matrix [batch_size, seq_len] for padding purposes (0 indicating padding),"
            f" with batch_size={batch_size} and seq_len of at least {q_len}, got {list(shape)}"
        )


def require_cache_layer_idx(module: nn.Module, past_key_values: Any) -> int | None:
    """The module's `layer_idx`; ValueError if a cache is given and there is none."""
    layer_idx = getattr(module, "layer_idx", None)
    if past_key_values is not None and layer_idx is None:
        raise ValueError(f"{type(module).__name__} requires `layer_idx` when `past_key_values` is provided.")
    return layer_idx


def get_layer_cache(module: nn.Module, past_key_values: Any) -> dict[str, Any] | None:
    """The module's state dict in a cache, None without a cache or before its first update."""
    layer_idx = require_cache_layer_idx(module, past_key_values)
    if layer_idx is not None and past_key_values is not None and len(past_key_values) > layer_idx:
        return past_key_values[layer_idx]
    return None


def update_layer_cache(module: nn.Module, past_key_values: Any, **kwargs: Any) -> dict[str, Any] | None:
    """`past_key_values.update(layer_idx=module.layer_idx, **kwargs)`, if there is a cache."""
    layer_idx = require_cache_layer_idx(module, past_key_values)
    return None if past_key_values is None else past_key_values.update(layer_idx=layer_idx, **kwargs)
