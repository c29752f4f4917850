"""What the configurations of the models share: FLA's fields, softmax attention in chosen layers, and their checks."""

import math
import warnings
from typing import Any

from transformers.configuration_utils import PretrainedConfig

from fla_npu.models.tp_plan import base_model_tp_plan

AttentionConfig = dict[str, Any] | list[dict[str, Any]] | None
"""`layers` and `num_heads`, and optionally `num_kv_heads`, `qkv_bias`, `window_size` and `rope_theta`, of softmax
attention in some layers; a list for several kinds."""


def parse_attention_config(attn: AttentionConfig, *, num_hidden_layers: int) -> AttentionConfig:
    """A copy of `attn` with the defaults filled in; unknown keys stay.

    Raises:
        ValueError: names the field that is missing, of a wrong type or out of range, or the layer that is taken twice.
    """
    if attn is None:
        return None
    if not isinstance(attn, (dict, list)):
        raise ValueError(f"attn must be None, a dictionary, or a list of dictionaries; got {attn!r}")
    taken: set[int] = set()
    parsed = [
        _parse_specification(spec, num_hidden_layers, taken) for spec in ([attn] if isinstance(attn, dict) else attn)
    ]
    return parsed[0] if isinstance(attn, dict) else parsed


def _parse_specification(spec: Any, num_hidden_layers: int, taken: set[int]) -> dict[str, Any]:
    if not isinstance(spec, dict):
        raise ValueError(f"an attn specification must be a dictionary; got {spec!r}")

    def refuse(name: str, expected: str) -> None:
        raise ValueError(f"attn field {name!r} must be {expected}; got {spec.get(name, '<missing>')!r}")

    defaults = {
        "num_kv_heads": spec.get("num_heads"),
        "qkv_bias": False,
        "window_size": None,
        "rope_theta": 10000.0,
    }
    parsed = {**defaults, **spec}
    if parsed["num_kv_heads"] is None:
        parsed["num_kv_heads"] = defaults["num_kv_heads"]
    layers = parsed.get("layers")
    if not isinstance(layers, (list, tuple)) or not all(_is_int(layer) for layer in layers):
        refuse("layers", "a list of integer layer indices")
        raise AssertionError
    parsed["layers"] = list(layers)
    for layer in layers:
        if not 0 <= layer < num_hidden_layers:
            refuse("layers", f"in [0, {num_hidden_layers})")
        if layer in taken:
            raise ValueError(f"attn assigns layer {layer} twice")
        taken.add(layer)
    for name in ("num_heads", "num_kv_heads"):
        if not _is_int(parsed.get(name)) or parsed[name] <= 0:
            refuse(name, "a positive integer")
    if not isinstance(parsed["qkv_bias"], bool):
        refuse("qkv_bias", "a bool")
    if parsed["window_size"] is not None and (not _is_int(parsed["window_size"]) or parsed["window_size"] <= 0):
        refuse("window_size", "a positive integer or None")
    theta = parsed["rope_theta"]
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not (math.isfinite(theta) and theta > 0):
        refuse("rope_theta", "positive and finite")
    return parsed


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def get_attention_spec(attn: AttentionConfig, *, layer_idx: int) -> dict[str, Any] | None:
    """The specification of softmax attention in layer `layer_idx`, None where the layer is a recurrent one."""
    specs = [attn] if isinstance(attn, dict) else attn or []
    return next((spec for spec in specs if layer_idx in spec["layers"]), None)


class FLAConfig(PretrainedConfig):
    """Fields of the configurations of all families; those of the layer and the model they are given to.

    Args:
        attn_mode: `mode` of the layers.
        hidden_size, hidden_ratio, intermediate_size, hidden_act: of the layers and of `GatedMLP`.
        expand_v, use_short_conv, conv_size, num_heads: of the layers.
        max_position_embeddings: of the softmax attention.
        num_hidden_layers: how many layers.
        norm_eps: of all norms.
        attn: layers with softmax attention in place of the recurrent layer, see `AttentionConfig`.
        use_cache: return a cache outside training.
        initializer_range: standard deviation of initial weights.
        fuse_norm, fuse_swiglu: accepted for FLA's sake, the results are the same. Where the layer has a `fuse_norm` of
            its own, it gets this one.
        fuse_cross_entropy: the loss keeps no fp32 copy of the logits.
        fuse_linear_cross_entropy: the loss is computed without ever holding all logits; excludes `fuse_cross_entropy`.
            None in a family that has no such field.
        use_l2warp: add the gradient of `l2_warp` to that of the loss.
        attnres_block_size: attention over the residual stream, https://arxiv.org/abs/2603.15031: sub-layers per block.

    Raises:
        ValueError: fields that contradict each other.
    """

    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    base_model_tp_plan = base_model_tp_plan()

    def __init__(
        self,
        *,
        attn_mode: str,
        hidden_size: int,
        expand_v: float,
        use_short_conv: bool,
        conv_size: int,
        num_heads: int,
        max_position_embeddings: int,
        hidden_ratio: int | None,
        intermediate_size: int | None,
        hidden_act: str,
        num_hidden_layers: int,
        norm_eps: float,
        attn: AttentionConfig,
        use_cache: bool,
        initializer_range: float,
        fuse_norm: bool,
        fuse_swiglu: bool,
        fuse_cross_entropy: bool,
        use_l2warp: bool,
        vocab_size: int,
        attnres_block_size: int | None,
        fuse_linear_cross_entropy: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if attnres_block_size not in (None, 1) and (attnres_block_size < 2 or attnres_block_size % 2):
            raise ValueError(f"attnres_block_size must be None, 1 or an even number, got {attnres_block_size}")
        if fuse_linear_cross_entropy is not None:
            self.fuse_linear_cross_entropy = fuse_linear_cross_entropy
        check_losses(fuse_cross_entropy, fuse_linear_cross_entropy, stacklevel=4)
        self.attn_mode = attn_mode
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.use_short_conv = use_short_conv
        self.conv_size = conv_size
        self.num_heads = num_heads
        self.max_position_embeddings = max_position_embeddings
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.num_hidden_layers = num_hidden_layers
        self.norm_eps = norm_eps
        self.attn = attn
        self.use_cache = use_cache
        self.initializer_range = initializer_range
        self.fuse_norm = fuse_norm
        self.fuse_swiglu = fuse_swiglu
        self.fuse_cross_entropy = fuse_cross_entropy
        self.use_l2warp = use_l2warp
        self.vocab_size = vocab_size
        self.attnres_block_size = attnres_block_size
        super().__init__(**kwargs)

    @property
    def attn(self) -> AttentionConfig:
        """Layers with softmax attention; checked when it is set."""
        return self.__dict__.get("attn")

    @attn.setter
    def attn(self, value: AttentionConfig) -> None:
        self.__dict__["attn"] = parse_attention_config(value, num_hidden_layers=self.num_hidden_layers)


def check_losses(fuse_cross_entropy: bool, fuse_linear_cross_entropy: bool | None, stacklevel: int) -> None:
    """ValueError if both are asked for; a warning about the precision of the second, as in FLA.

    Args:
        stacklevel: of the warning, for who makes the configuration.
    """
    if not fuse_linear_cross_entropy:
        return
    if fuse_cross_entropy:
        raise ValueError("fuse_cross_entropy and fuse_linear_cross_entropy cannot both be True")
    warnings.warn(
        "fuse_linear_cross_entropy saves memory; gradients of 16-bit weights are rounded once more",
        stacklevel=stacklevel,
    )
