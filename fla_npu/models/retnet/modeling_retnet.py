"""Language models of retention layers."""

from fla_npu.layers.multiscale_retention import MultiScaleRetention
from fla_npu.models.modeling_utils import FLABlock, FLAForCausalLM, FLAModel, FLAPreTrainedModel
from fla_npu.models.retnet.configuration_retnet import RetNetConfig


class RetNetBlock(FLABlock):
    """A block with a `MultiScaleRetention` layer."""

    @staticmethod
    def mixer(config: RetNetConfig, layer_idx: int) -> MultiScaleRetention:
        return MultiScaleRetention(
            mode=config.attn_mode,
            hidden_size=config.hidden_size,
            expand_k=config.expand_k,
            expand_v=config.expand_v,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            feature_map=config.feature_map,
            use_output_gate=config.use_output_gate,
            gate_fn=config.hidden_act,
            elementwise_affine=config.elementwise_affine,
            norm_eps=config.norm_eps,
            fuse_norm=config.fuse_norm,
            layer_idx=layer_idx,
        )


class RetNetPreTrainedModel(FLAPreTrainedModel):
    config_class = RetNetConfig
    _no_split_modules = ["RetNetBlock"]  # noqa: RUF012


class RetNetModel(RetNetPreTrainedModel, FLAModel):
    """See `FLAModel`."""

    block = RetNetBlock


class RetNetForCausalLM(RetNetPreTrainedModel, FLAForCausalLM):
    """See `FLAForCausalLM`."""

    model_class = RetNetModel
