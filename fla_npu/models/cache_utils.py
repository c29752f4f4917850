"""The state cache of FLA's layers and models. Works without transformers; with it, `Cache` is one of its caches."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:

    class CacheBase: ...

    class LayerBase: ...

else:
    try:
        from transformers.cache_utils import Cache as CacheBase
        from transformers.cache_utils import CacheLayerMixin as LayerBase
    except ImportError:

        class CacheBase: ...

        class LayerBase: ...


KEYS = ("recurrent_state", "attn_state", "conv_state", "ffn_state")


class FLALayer(LayerBase):
    """The states of one layer and the number of tokens they have seen. `state` is a dict with `KEYS`, or None."""

    is_compileable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] | None = None
        self.window_size: int | None = None
        self.is_initialized = False
        self._seen_tokens = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Nothing is allocated ahead; transformers requires the method."""

    def update(
        self,
        *,
        recurrent_state: Any = None,
        attn_state: Sequence[torch.Tensor] | None = None,
        conv_state: Any = None,
        ffn_state: Any = None,
        offset: int = 1,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """See `FLACache.update`."""
        if attn_state is not None and not isinstance(attn_state, (tuple, list)):
            raise ValueError(f"`attn_state` must be a tuple or list of tensors, got {type(attn_state).__name__}")
        self.window_size = (cache_kwargs or {}).get("window_size", self.window_size)
        self.is_sliding = self.window_size is not None
        if self.state is None:
            self.state = dict.fromkeys(KEYS)
        for key, value in (
            ("recurrent_state", recurrent_state),
            ("conv_state", conv_state),
            ("ffn_state", ffn_state),
        ):
            if value is not None:
                self.state[key] = value
        if attn_state and attn_state[0] is not None:
            offset = attn_state[0].shape[1]
            cached = self.state["attn_state"]
            if cached is not None:
                attn_state = [torch.cat(pair, dim=1) for pair in zip(cached, attn_state, strict=True)]
            if self.window_size is not None:
                attn_state = [s[:, -self.window_size :].contiguous() for s in attn_state]
            self.state["attn_state"] = tuple(attn_state)
        self._seen_tokens += offset
        self.is_initialized = True
        return self.state

    def get_seq_length(self, cache_position: torch.Tensor | None = None) -> int:
        return self._seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of keys that a query of `query_length` tokens sees, and how many keys before them were dropped."""
        kept = self._seen_tokens if self.window_size is None else min(self._seen_tokens, self.window_size - 1)
        return kept + query_length, self._seen_tokens - kept

    def mapped(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any] | None:
        """The state with `fn` applied to every tensor in it."""
        return _map(fn, self.state)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.state = self.mapped(_select(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = self.mapped(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def length_after_crop(self, max_length: int) -> int:
        """Tokens left by `crop(max_length)`, or NotImplementedError if that needs states that are gone."""
        if max_length < 0:
            max_length = max(0, self._seen_tokens + max_length)
        if max_length >= self._seen_tokens:
            return self._seen_tokens
        kept = [k for k in KEYS if k != "attn_state" and self.state is not None and self.state[k] is not None]
        if kept:
            raise NotImplementedError(f"cannot roll {' and '.join(kept)} back from {self._seen_tokens} tokens")
        if self.window_size is not None and self._seen_tokens > self.window_size:
            raise NotImplementedError("cannot roll a sliding window back, the tokens before it were dropped")
        return max_length

    def crop(self, max_length: int) -> None:
        self._seen_tokens = self.length_after_crop(max_length)
        if self.state is not None and self.state["attn_state"] is not None:
            self.state["attn_state"] = tuple(s[:, : self._seen_tokens] for s in self.state["attn_state"])

    def reset(self) -> None:
        self.state = None
        self._seen_tokens = 0
        self.is_initialized = False


class FLACache(CacheBase):
    """States of a model's layers, `cache[i]` being the dict of layer i.

    States are kept by reference and in the layer's own layout: the first axis is the batch, everything else is up to
    the layer that stores them.
    """

    is_compileable = False

    def __init__(self, seen_tokens: int = 0, offloading: bool = False) -> None:
        # The three attributes that transformers' Cache has; its own constructor would not run without transformers.
        self.layers: list[FLALayer] = []
        self.layer_class_to_replicate = FLALayer
        self.offloading = False
        if offloading:
            raise NotImplementedError("automatic offloading of recurrent states is not supported")
        self._seen_tokens = int(seen_tokens)

    def update(
        self,
        recurrent_state: Any = None,
        attn_state: Sequence[torch.Tensor] | None = None,
        conv_state: Any = None,
        ffn_state: Any = None,
        layer_idx: int = 0,
        offset: int | None = 1,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Store states of one layer; None leaves the old one.

        Args:
            recurrent_state, conv_state, ffn_state: tensors or (nested) tuples, lists or dicts of them, kept by
                reference.
            attn_state: keys and values `[B, T, ...]` of new tokens, appended to the old ones.
            layer_idx: which layer; layers up to it are created.
            offset: tokens that the states have newly seen; with `attn_state` its length counts.
            cache_kwargs: `window_size` limits the length of `attn_state`.

        Returns:
            The layer's dict.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(FLALayer())
        return self.layers[layer_idx].update(
            recurrent_state=recurrent_state,
            attn_state=attn_state,
            conv_state=conv_state,
            ffn_state=ffn_state,
            offset=1 if offset is None else offset,
            cache_kwargs=cache_kwargs,
        )

    def __getitem__(self, layer_idx: int) -> dict[str, Any] | None:
        if layer_idx >= len(self.layers):
            raise KeyError(f"Cache only has {len(self.layers)} layers, attempted to access layer {layer_idx}")
        return self.layers[layer_idx].state

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        return (layer.state for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int | None = 0, cache_position: torch.Tensor | None = None) -> int:
        """Tokens that a layer has seen."""
        layer_idx = layer_idx or 0
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        """-1: there is no limit."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """See `FLALayer.get_mask_sizes`."""
        return (
            self.layers[layer_idx].get_mask_sizes(query_length) if layer_idx < len(self.layers) else (query_length, 0)
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i of every state becomes the old row `beam_idx[i]`."""
        self._map(_select(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row of every state `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep rows `indices` of every state."""
        self.reorder_cache(indices)

    def crop(self, max_length: int) -> None:
        """Forget all but the first `max_length` tokens; for a negative number, forget that many.

        Raises:
            NotImplementedError: a recurrent, convolution or feed-forward state would have to be rolled back. No layer
                is changed then.
        """
        for layer in self.layers:
            layer.length_after_crop(max_length)
        for layer in self.layers:
            layer.crop(max_length)

    def reset(self) -> None:
        """Forget all states; the layers stay."""
        for layer in self.layers:
            layer.reset()
        self._seen_tokens = 0

    def to_legacy_cache(self) -> tuple[dict[str, Any] | None, ...]:
        """The layers' dicts."""
        return tuple(self)

    @classmethod
    def from_legacy_cache(cls, past_key_values: Any = None, seen_tokens: int = 0) -> "FLACache":
        """A cache of this class from one of FLA's: itself, an object with `states`, or a sequence of state dicts.

        Raises:
            TypeError: anything else.
        """
        if isinstance(past_key_values, cls):
            return past_key_values
        if hasattr(past_key_values, "states"):
            seen_tokens, past_key_values = past_key_values.get_seq_length(), past_key_values.states
        if past_key_values is not None and not isinstance(past_key_values, (list, tuple)):
            raise TypeError(
                f"Expected an FLA cache or a sequence of FLA state dictionaries, got {type(past_key_values).__name__}"
            )
        cache = cls(seen_tokens=seen_tokens)
        for i, state in enumerate(past_key_values or ()):
            cache.layers.append(FLALayer())
            if state is not None:
                cache.update(**state, layer_idx=i, offset=0)
            cache.layers[i]._seen_tokens = int(seen_tokens)
        return cache

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        states = [layer.mapped(fn) for layer in self.layers]
        for layer, state in zip(self.layers, states, strict=True):
            layer.state = state


class Cache(FLACache):
    """The cache that layers and models take as `past_key_values`."""


class LegacyFLACache(FLACache):
    """FLA's older class, which also gives the layers' dicts as a list, `states`."""

    @property
    def states(self) -> list[dict[str, Any] | None]:
        return list(self)


def _select(indices: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.index_select(0, indices.to(x.device))


def _map(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: _map(fn, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_map(fn, item) for item in value)
    if value is None:
        return None
    raise NotImplementedError(f"cannot reorder a state of type {type(value).__name__}")
