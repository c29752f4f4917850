"""Configuration of the DeltaNet models."""

from typing import Any

from fla_npu.models.configuration_utils import AttentionConfig, FLAConfig


class DeltaNetConfig(FLAConfig):
    """FLA's fields and defaults; see `FLAConfig`, and for the others the layer.

    `use_output_norm` has no effect, in FLA neither: there is always a norm.
    """

    model_type = "delta_net"

    def __init__(
        self,
        attn_mode: str = "chunk",
        hidden_size: int = 2048,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        use_gate: bool = False,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        use_beta: bool = True,
        use_output_norm: bool = True,
        num_heads: int = 16,
        qk_norm: str = "l2",
        qk_activation: str = "silu",
        max_position_embeddings: int = 2048,
        hidden_ratio: int | None = 4,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        num_hidden_layers: int = 24,
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
        self.expand_k = expand_k
        self.use_gate = use_gate
        self.allow_neg_eigval = allow_neg_eigval
        self.use_beta = use_beta
        self.use_output_norm = use_output_norm
        self.qk_norm = qk_norm
        self.qk_activation = qk_activation
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
