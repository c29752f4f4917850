"""Configuration of the Mamba-2 models."""

from typing import Any

from transformers.configuration_utils import PretrainedConfig

from fla_npu.models.configuration_utils import check_losses


class Mamba2Config(PretrainedConfig):
    """FLA's fields and defaults. Those of the layer are described there; the others are

    Args:
        num_hidden_layers: how many blocks, each of a norm and a layer.
        initializer_range: standard deviation of initial weights.
        residual_in_fp32: add up the residual stream in fp32.
        rescale_prenorm_residual: start output projections as torch does, over the root of the number of blocks.
        fuse_norm: accepted for FLA's sake, the result is the same.
        use_cache, fuse_cross_entropy, fuse_linear_cross_entropy, use_l2warp: as in `FLAConfig`.

    Raises:
        ValueError: fields that contradict each other.
    """

    model_type = "mamba2"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    attnres_block_size = None
    """Mamba-2 has no attention residuals."""

    def __init__(
        self,
        head_dim: int = 64,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        state_size: int = 128,
        num_hidden_layers: int = 48,
        norm_eps: float = 1e-5,
        pad_token_id: int | None = 0,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        expand: int = 2,
        conv_kernel: int = 4,
        n_groups: int = 1,
        use_bias: bool = False,
        use_conv_bias: bool = True,
        conv_init: float | None = None,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        hidden_act: str = "silu",
        initializer_range: float = 0.02,
        residual_in_fp32: bool = True,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        rescale_prenorm_residual: bool = True,
        use_cache: bool = True,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        chunk_size: int = 256,
        fuse_norm: bool = True,
        fuse_cross_entropy: bool = True,
        fuse_linear_cross_entropy: bool = False,
        use_l2warp: bool = False,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        if len(A_init_range) != 2 or not 0 < A_init_range[0] <= A_init_range[1]:
            raise ValueError(f"A_init_range must be two positive numbers in order, got {A_init_range}")
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min and dt_max must be positive and in order, got {dt_min} and {dt_max}")
        if dt_init_floor <= 0:
            raise ValueError(f"dt_init_floor must be positive, got {dt_init_floor}")
        check_losses(fuse_cross_entropy, fuse_linear_cross_entropy, stacklevel=3)
        self.head_dim = head_dim
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.state_size = state_size
        self.num_hidden_layers = num_hidden_layers
        self.norm_eps = norm_eps
        self.expand = expand
        self.conv_kernel = conv_kernel
        self.n_groups = n_groups
        self.use_bias = use_bias
        self.use_conv_bias = use_conv_bias
        self.conv_init = conv_init
        # Lists, where they come from a file.
        self.A_init_range = (A_init_range[0], A_init_range[1])
        self.D_has_hdim = D_has_hdim
        self.hidden_act = hidden_act
        self.initializer_range = initializer_range
        self.residual_in_fp32 = residual_in_fp32
        self.dt_min = dt_min
        self.dt_max = dt_max
        self.dt_init_floor = dt_init_floor
        self.dt_limit = (dt_limit[0], dt_limit[1])
        self.rescale_prenorm_residual = rescale_prenorm_residual
        self.use_cache = use_cache
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.chunk_size = chunk_size
        self.fuse_norm = fuse_norm
        self.fuse_cross_entropy = fuse_cross_entropy
        self.fuse_linear_cross_entropy = fuse_linear_cross_entropy
        self.use_l2warp = use_l2warp
        self.num_heads = int(expand * hidden_size / head_dim)
        kwargs |= {
            "pad_token_id": pad_token_id,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "tie_word_embeddings": tie_word_embeddings,
        }
        super().__init__(**kwargs)
