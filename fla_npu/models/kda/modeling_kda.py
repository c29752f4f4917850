"""Language models of Kimi Delta Attention layers."""

from fla_npu.layers.kda import KimiDeltaAttention
from fla_npu.models.kda.configuration_kda import KDAConfig
from fla_npu.models.modeling_utils import FLABlock, FLAForCausalLM, FLAModel, FLAPreTrainedModel


class KDABlock(FLABlock):
    """A block with a `KimiDeltaAttention` layer."""

    @staticmethod
    def mixer(config: KDAConfig, layer_idx: int) -> KimiDeltaAttention:
        return KimiDeltaAttention(
            hidden_size=config.hidden_size,
            expand_v=config.expand_v,
            head_dim=config.head_dim,
            num_heads=config.num_heads,
            num_v_heads=config.num_v_heads,
            mode=config.attn_mode,
            use_short_conv=config.use_short_conv,
            allow_neg_eigval=config.allow_neg_eigval,
            safe_gate=config.safe_gate,
            lower_bound=config.lower_bound,
            conv_size=config.conv_size,
            layer_idx=layer_idx,
            norm_eps=config.norm_eps,
        )


class KDAPreTrainedModel(FLAPreTrainedModel):
    config_class = KDAConfig
    _no_split_modules = ["KDABlock"]  # noqa: RUF012

    def _lowest_rate(self, layer: KimiDeltaAttention) -> float | None:
        return None if layer.safe_gate else 1.0


class KDAModel(KDAPreTrainedModel, FLAModel):
    """See `FLAModel`."""

    block = KDABlock


class KDAForCausalLM(KDAPreTrainedModel, FLAForCausalLM):
    """See `FLAForCausalLM`."""

    model_class = KDAModel

    def _fuses_head_and_loss(self) -> bool:
        return self.config.fuse_cross_entropy and self.training
