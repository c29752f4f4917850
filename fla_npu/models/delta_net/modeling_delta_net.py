"""Language models of DeltaNet layers."""

from fla_npu.layers.delta_net import DeltaNet
from fla_npu.models.delta_net.configuration_delta_net import DeltaNetConfig
from fla_npu.models.modeling_utils import FLABlock, FLAForCausalLM, FLAModel, FLAPreTrainedModel


class DeltaNetBlock(FLABlock):
    """A block with a `DeltaNet` layer."""

    @staticmethod
    def mixer(config: DeltaNetConfig, layer_idx: int) -> DeltaNet:
        return DeltaNet(
            mode=config.attn_mode,
            hidden_size=config.hidden_size,
            expand_k=config.expand_k,
            expand_v=config.expand_v,
            num_heads=config.num_heads,
            use_beta=config.use_beta,
            use_gate=config.use_gate,
            use_short_conv=config.use_short_conv,
            conv_size=config.conv_size,
            allow_neg_eigval=config.allow_neg_eigval,
            qk_activation=config.qk_activation,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            layer_idx=layer_idx,
        )


class DeltaNetPreTrainedModel(FLAPreTrainedModel):
    config_class = DeltaNetConfig
    _no_split_modules = ["DeltaNetBlock"]  # noqa: RUF012


class DeltaNetModel(DeltaNetPreTrainedModel, FLAModel):
    """See `FLAModel`."""

    block = DeltaNetBlock


class DeltaNetForCausalLM(DeltaNetPreTrainedModel, FLAForCausalLM):
    """See `FLAForCausalLM`."""

    model_class = DeltaNetModel
