"""Language models of gated linear attention layers."""

from fla_npu.layers.gla import GatedLinearAttention
from fla_npu.models.gla.configuration_gla import GLAConfig
from fla_npu.models.modeling_utils import FLABlock, FLAForCausalLM, FLAModel, FLAPreTrainedModel


class GLABlock(FLABlock):
    """A block with a `GatedLinearAttention` layer."""

    @staticmethod
    def mixer(config: GLAConfig, layer_idx: int) -> GatedLinearAttention:
        return GatedLinearAttention(
            mode=config.attn_mode,
            hidden_size=config.hidden_size,
            expand_k=config.expand_k,
            expand_v=config.expand_v,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            feature_map=config.feature_map,
            use_short_conv=config.use_short_conv,
            conv_size=config.conv_size,
            use_output_gate=config.use_output_gate,
            gate_fn=config.hidden_act,
            elementwise_affine=config.elementwise_affine,
            norm_eps=config.norm_eps,
            clamp_min=config.clamp_min,
            fuse_norm=config.fuse_norm,
            layer_idx=layer_idx,
        )


class GLAPreTrainedModel(FLAPreTrainedModel):
    config_class = GLAConfig
    _no_split_modules = ["GLABlock"]  # noqa: RUF012


class GLAModel(GLAPreTrainedModel, FLAModel):
    """See `FLAModel`."""

    block = GLABlock


class GLAForCausalLM(GLAPreTrainedModel, FLAForCausalLM):
    """See `FLAForCausalLM`."""

    model_class = GLAModel
