"""Language models of Mamba-2 layers."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fla_npu.layers.mamba2 import Mamba2
from fla_npu.models.cache_utils import Cache
from fla_npu.models.mamba2.configuration_mamba2 import Mamba2Config
from fla_npu.models.modeling_utils import FLAForCausalLM, FLAModel, FLAPreTrainedModel, fill_parameter
from fla_npu.modules import RMSNorm


class Mamba2Block(GradientCheckpointingLayer):
    """A `Mamba2` layer after a norm and around a residual stream."""

    def __init__(self, config: Mamba2Config, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=torch.float32)
        self.mixer = Mamba2(
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            state_size=config.state_size,
            expand=config.expand,
            n_groups=config.n_groups,
            conv_kernel=config.conv_kernel,
            conv_init=config.conv_init,
            use_conv_bias=config.use_conv_bias,
            hidden_act=config.hidden_act,
            A_init_range=config.A_init_range,
            D_has_hdim=config.D_has_hdim,
            rmsnorm=config.rmsnorm,
            norm_before_gate=config.norm_before_gate,
            dt_min=config.dt_min,
            dt_max=config.dt_max,
            dt_init_floor=config.dt_init_floor,
            dt_limit=config.dt_limit,
            use_bias=config.use_bias,
            norm_eps=config.norm_eps,
            chunk_size=config.chunk_size,
            layer_idx=layer_idx,
        )

    def forward(
        self, hidden_states: torch.Tensor, attnres_states: None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None, Cache | None, None]:
        """The block's hidden states `[B, T, hidden]`, and the cache, at the places where `FLABlock` has them.

        Args:
            hidden_states: `[B, T, hidden]`.
            attnres_states: None, there are no attention residuals.
            **kwargs: those of the layer.
        """
        normed = self.norm(hidden_states)
        mixed, _, past_key_values = self.mixer(hidden_states=normed, **kwargs)
        if self.residual_in_fp32:
            hidden_states = hidden_states.float()
        return (hidden_states + mixed).to(normed.dtype), None, past_key_values, None


class Mamba2PreTrainedModel(FLAPreTrainedModel):
    config_class = Mamba2Config
    base_model_prefix = "backbone"
    _no_split_modules = ["Mamba2Block"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        if not isinstance(module, Mamba2):
            return super()._init_weights(module)
        fill_parameter(module.A_log, module.initial_A_log())
        fill_parameter(module.dt_bias, module.initial_dt_bias())
        fill_parameter(module.D, torch.ones_like(module.D))
        if module.conv_init is not None:
            weight = module.conv1d.weight
            fill_parameter(weight, torch.empty_like(weight).uniform_(-module.conv_init, module.conv_init))
        if self.config.rescale_prenorm_residual:
            weight = torch.empty_like(module.out_proj.weight)
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            fill_parameter(module.out_proj.weight, weight / math.sqrt(self.config.num_hidden_layers))


class Mamba2Model(Mamba2PreTrainedModel, FLAModel):
    """See `FLAModel`. In checkpoints the final norm is `norm_f`; padding tokens have an embedding like others."""

    block = Mamba2Block

    def __init__(self, config: Mamba2Config) -> None:
        FLAPreTrainedModel.__init__(self, config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Mamba2Block(config, i) for i in range(config.num_hidden_layers)])
        self.norm_f = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=torch.float32)
        self.gradient_checkpointing = False
        self.register_load_state_dict_pre_hook(_embeddings_by_their_old_name)
        self.post_init()

    @property
    def final_norm(self) -> RMSNorm:
        return self.norm_f


class Mamba2ForCausalLM(Mamba2PreTrainedModel, FLAForCausalLM):
    """See `FLAForCausalLM`; the model is `backbone`."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embeddings.weight"}  # noqa: RUF012
    model_class = Mamba2Model


def _embeddings_by_their_old_name(
    module: nn.Module, state_dict: Mapping[str, torch.Tensor], prefix: str, *_: Any
) -> None:
    """The checkpoints of state-spaces call them `embedding`."""
    old = f"{prefix}embedding.weight"
    if old in state_dict:
        state_dict[f"{prefix}embeddings.weight"] = state_dict.pop(old)  # type: ignore[attr-defined,index]
