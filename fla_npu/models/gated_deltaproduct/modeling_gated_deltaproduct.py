"""Language models of Gated DeltaProduct layers."""

from fla_npu.layers.gated_deltaproduct import GatedDeltaProduct
from fla_npu.models.gated_deltaproduct.configuration_gated_deltaproduct import GatedDeltaProductConfig
from fla_npu.models.modeling_utils import FLABlock, FLAForCausalLM, FLAModel, FLAPreTrainedModel


class GatedDeltaProductBlock(FLABlock):
    """A block with a `GatedDeltaProduct` layer."""

    @staticmethod
    def mixer(config: GatedDeltaProductConfig, layer_idx: int) -> GatedDeltaProduct:
        return GatedDeltaProduct(
            hidden_size=config.hidden_size,
            expand_v=config.expand_v,
            head_dim=config.head_dim,
            num_heads=config.num_heads,
            mode=config.attn_mode,
            use_output_gate=config.use_output_gate,
            use_short_conv=config.use_short_conv,
            conv_size=config.conv_size,
            norm_eps=config.norm_eps,
            use_forget_gate=config.use_forget_gate,
            allow_neg_eigval=config.allow_neg_eigval,
            num_householder=config.num_householder,
            layer_idx=layer_idx,
        )


class GatedDeltaProductPreTrainedModel(FLAPreTrainedModel):
    config_class = GatedDeltaProductConfig
    _no_split_modules = ["GatedDeltaProductBlock"]  # noqa: RUF012


class GatedDeltaProductModel(GatedDeltaProductPreTrainedModel, FLAModel):
    """See `FLAModel`."""

    block = GatedDeltaProductBlock


class GatedDeltaProductForCausalLM(GatedDeltaProductPreTrainedModel, FLAForCausalLM):
    """See `FLAForCausalLM`."""

    model_class = GatedDeltaProductModel
