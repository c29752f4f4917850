"""Language models of Gated DeltaNet layers."""

from fla_npu.layers.gated_deltanet import GatedDeltaNet
from fla_npu.models.gated_deltanet.configuration_gated_deltanet import GatedDeltaNetConfig
from fla_npu.models.modeling_utils import FLABlock, FLAForCausalLM, FLAModel, FLAPreTrainedModel


class GatedDeltaNetBlock(FLABlock):
    """A block with a `GatedDeltaNet` layer."""

    @staticmethod
    def mixer(config: GatedDeltaNetConfig, layer_idx: int) -> GatedDeltaNet:
        return GatedDeltaNet(
            hidden_size=config.hidden_size,
            expand_v=config.expand_v,
            head_dim=config.head_dim,
            num_heads=config.num_heads,
            num_v_heads=config.num_v_heads,
            mode=config.attn_mode,
            use_gate=config.use_gate,
            use_short_conv=config.use_short_conv,
            allow_neg_eigval=config.allow_neg_eigval,
            conv_size=config.conv_size,
            layer_idx=layer_idx,
            norm_eps=config.norm_eps,
            output_gate_activation=config.output_gate_activation,
        )


class GatedDeltaNetPreTrainedModel(FLAPreTrainedModel):
    config_class = GatedDeltaNetConfig
    _no_split_modules = ["GatedDeltaNetBlock"]  # noqa: RUF012


class GatedDeltaNetModel(GatedDeltaNetPreTrainedModel, FLAModel):
    """See `FLAModel`."""

    block = GatedDeltaNetBlock


class GatedDeltaNetForCausalLM(GatedDeltaNetPreTrainedModel, FLAForCausalLM):
    """See `FLAForCausalLM`."""

    model_class = GatedDeltaNetModel
