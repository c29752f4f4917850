"""Configuration of the RetNet models."""

import warnings
from typing import Any

from fla_npu.models.configuration_utils import AttentionConfig, FLAConfig


class RetNetConfig(FLAConfig):
    """FLA's fields and defaults; see `FLAConfig`, and for the others the layer.

    `hidden_act` is also the activation of the output gate. `use_short_conv` and `conv_size` have no effect, as in FLA,
    whose checkpoints have no convolutions in any case; asking for them warns.
    """

    model_type = "retnet"

    def __init__(
        self,
        attn_mode: str = "chunk",
        hidden_size: int = 2048,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        hidden_ratio: int | None = 2,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 24,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        hidden_act: str = "swish",
        use_short_conv: bool = False,
        conv_size: int = 4,
        use_output_gate: bool = True,
        max_position_embeddings: int = 2048,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-6,
        attn: AttentionConfig = None,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        fuse_norm: bool = True,
        fuse_swiglu: bool = True,
        fuse_cross_entropy: bool = True,
        fuse_linear_cross_entropy: bool = False,
        use_l2warp: bool = False,
        vocab_size: int = 32000,
        attnres_block_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        if use_short_conv:
            warnings.warn("RetNet models have no short convolutions: use_short_conv=True has no effect", stacklevel=2)
        self.expand_k = expand_k
        self.num_kv_heads = num_kv_heads
        self.feature_map = feature_map
        self.use_output_gate = use_output_gate
        self.elementwise_affine = elementwise_affine
        super().__init__(
            attn_mode=attn_mode,
            hidden_size=hidden_size,
            expand_v=expand_v,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            num_heads=num_heads,
            max_position_embeddings=max_position_embeddings,
            hidden_ratio=hidden_ratio,
            intermediate_size=intermediate_size,
            hidden_act=hidden_act,
            num_hidden_layers=num_hidden_layers,
            norm_eps=norm_eps,
            attn=attn,
            use_cache=use_cache,
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            initializer_range=initializer_range,
            fuse_norm=fuse_norm,
            fuse_swiglu=fuse_swiglu,
            fuse_cross_entropy=fuse_cross_entropy,
            fuse_linear_cross_entropy=fuse_linear_cross_entropy,
            use_l2warp=use_l2warp,
            vocab_size=vocab_size,
            attnres_block_size=attnres_block_size,
            **kwargs,
        )
