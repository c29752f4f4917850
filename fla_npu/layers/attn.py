"""Softmax attention with rotary embeddings, for the layers of a hybrid model that are not recurrent."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.layers.utils import (
    check_attention_mask,
    get_layer_cache,
    has_padding,
    repad_hidden_states,
    unpad_hidden_states,
    update_layer_cache,
)
from fla_npu.modules.norm import RMSNorm
from fla_npu.modules.rotary import RotaryEmbedding, token_positions
from fla_npu.ops.checks import sequence_bounds

WINDOW_ROWS = 512
"""Queries that share one mask where a window limits the keys, unless the window is longer."""


class Attention(nn.Module):
    """Causal attention with grouped heads and rotary embeddings.

    Args:
        hidden_size: of input and output; heads have `hidden_size / num_heads` channels.
        num_heads: of queries.
        num_kv_heads: of keys and values, a divisor of `num_heads`; `num_heads` when None.
        qkv_bias: biases in the projections of queries, keys and values.
        qk_norm: RMS norms of the heads of queries and keys, in fp32.
        window_size: tokens that a query sees, itself included; all before it when None.
        rope_theta: base of the rotary embedding.
        max_position_embeddings: accepted for FLA's sake; positions have no limit.
        layer_idx: of the layer's keys and values in a cache.

    Raises:
        ShapeError: sizes that do not fit together.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        rope_theta: float | None = 10000.0,
        max_position_embeddings: int | None = None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if hidden_size % num_heads or num_heads % num_kv_heads:
            raise ShapeError(
                "hidden_size must be a multiple of num_heads, and that of num_kv_heads, "
                f"got {hidden_size}, {num_heads} and {num_kv_heads}"
            )
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_kv_groups = num_heads // num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.kv_dim = num_kv_heads * self.head_dim
        self.qkv_bias = qkv_bias
        self.qk_norm = qk_norm
        self.window_size = window_size
        self.rope_theta = 10000.0 if rope_theta is None else rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim, dtype=torch.float32)
            self.k_norm = RMSNorm(self.head_dim, dtype=torch.float32)
        self.rotary = RotaryEmbedding(self.head_dim, self.rope_theta)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Any]:
        """Mix tokens.

        Args:
            hidden_states: `[B, T, hidden]`.
            attention_mask: `[B, S]`, 0 at padding; S counts the cached tokens and these. Positions are counted without
                the padding, and outputs at padding are zero.
            past_key_values: a `Cache` with the keys and values of earlier tokens, or an empty one.
            output_attentions: ignored, the weights are never formed.
            use_cache: append these tokens to `past_key_values`; otherwise it stays as it is.
            **kwargs: `cu_seqlens` `[N + 1]`, bounds of the sequences packed in a batch of one; it takes precedence
                over the mask. Others are ignored, as in FLA.

        Returns:
            The output `[B, T, hidden]`, None, and `past_key_values`.

        Raises:
            ShapeError: a mask of another shape; `cu_seqlens` with cached tokens.
            ValueError: `past_key_values` without `layer_idx`.
        """
        batch_size, q_len = hidden_states.shape[:2]
        layer_cache = get_layer_cache(self, past_key_values)
        cached = None if layer_cache is None else layer_cache["attn_state"]
        seen = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        cu_seqlens = kwargs.get("cu_seqlens")
        if cu_seqlens is not None:
            if seen:
                raise ShapeError(f"cu_seqlens cannot continue the {seen} tokens in past_key_values")
            attention_mask = None
        if attention_mask is not None:
            attention_mask = self._checked_mask(attention_mask, batch_size, q_len, seen)

        q, k, v = (
            proj(hidden_states).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if attention_mask is None:
            positions = token_positions(q, seen, cu_seqlens)
        else:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, seen:]
        q, k = self.rotary(q, k, position_ids=positions)

        new = k.flatten(-2), v.flatten(-2)
        stored: tuple[torch.Tensor, ...] | None = None
        if past_key_values is not None and use_cache:
            state = update_layer_cache(
                self, past_key_values, attn_state=new, offset=q_len, cache_kwargs={"window_size": self.window_size}
            )
            assert state is not None
            stored = state["attn_state"]
        if cached is not None:
            if stored is None or self.window_size is not None:
                # A window's state has dropped keys that the first of several queries still sees.
                stored = tuple(torch.cat(pair, dim=1) for pair in zip(cached, new, strict=True))
            k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in stored)

        if attention_mask is None and cu_seqlens is None:
            o = self._attend(q, k, v)
        elif cached is None:
            # Packed, or made so: one sequence after the other needs no mask and no work on padding.
            packed, indices, bounds = unpad_hidden_states(
                torch.cat([q, k, v], dim=2), cu_seqlens, attention_mask, q_len
            )
            assert bounds is not None
            sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
            parts = [
                self._attend(*packed[:, start:end].split(sizes, dim=2))
                for start, end in pairwise(sequence_bounds(bounds, packed.shape[1]))
                if start < end
            ]
            o = torch.cat(parts, dim=1) if parts else packed[:, :, : self.num_heads]
            o = repad_hidden_states(o, indices, batch_size, q_len)
        else:
            assert attention_mask is not None
            real = attention_mask.bool()
            o = self._attend(q, k, v, real[:, -k.shape[1] :])
            o = o.masked_fill(~real[:, seen:, None, None], 0.0)
        return self.o_proj(o.flatten(-2)), None, past_key_values

    def _checked_mask(
        self, attention_mask: torch.Tensor, batch_size: int, q_len: int, seen: int
    ) -> torch.Tensor | None:
        """The mask's columns of the cached tokens and these, or None where nothing is padding."""
        check_attention_mask(attention_mask, batch_size, q_len + seen)
        attention_mask = attention_mask[:, attention_mask.shape[1] - q_len - seen :]
        return attention_mask if has_padding(attention_mask, q_len + seen) else None

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of the last queries of a sequence: q `[B, Tq, H, D]`, k and v `[B, Tk, H', D]`, `Tk >= Tq`.

        `real` `[B, Tk]` is False at keys that are padding; queries that are see at least themselves.
        """
        q_len, k_len = q.shape[1], k.shape[1]
        if self.window_size is None:
            return _scaled_dot_product(q, k, v, *_visible(q, k_len, None, real))
        parts = []
        size = max(self.window_size, WINDOW_ROWS)
        for start in range(0, q_len, size):
            end = min(start + size, q_len)
            last = k_len - q_len + end
            first = max(0, last - (end - start) - self.window_size + 1)
            block, keys = q[:, start:end], slice(first, last)
            visible = _visible(block, last - first, self.window_size, None if real is None else real[:, keys])
            parts.append(_scaled_dot_product(block, k[:, keys], v[:, keys], *visible))
        return torch.cat(parts, dim=1) if parts else q


def _visible(
    q: torch.Tensor, k_len: int, window: int | None, real: torch.Tensor | None
) -> tuple[torch.Tensor | None, bool]:
    """A mask `[1 or B, 1, Tq, Tk]` of the keys that the last queries see, and whether plain causality says it all."""
    q_len = q.shape[1]
    if real is None and (window is None or k_len <= window):
        if q_len == 1:
            return None, False
        if q_len == k_len:
            return None, True
    query = torch.arange(k_len - q_len, k_len, device=q.device)[:, None]
    key = torch.arange(k_len, device=q.device)
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    if real is None:
        return mask[None, None], False
    # The softmax of a row without any key would be NaN.
    return mask & real[:, None, None, :] | (key == query), False


def _scaled_dot_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """q `[B, Tq, H, D]`, k and v `[B, Tk, H', D]`, and the result like q."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if q.shape[1] == 1:
        # The queries of a group become the rows of one: keys and values need not be repeated.
        rows = q[:, 0].unflatten(1, (-1, groups))
        return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask).flatten(1, 2).unsqueeze(1)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)
