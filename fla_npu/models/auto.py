"""The models in transformers' Auto classes, under FLA's model types."""

import logging

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fla_npu.models.modeling_utils import FLAForCausalLM

logger = logging.getLogger(__name__)


def register(causal_lm: type[FLAForCausalLM]) -> None:
    """Let the Auto classes find a family. A model type that is taken, as it is once `fla` has been imported, stays what
    it is; Auto models of configurations of ours are ours in any case."""
    config = causal_lm.config_class
    if config.model_type not in CONFIG_MAPPING:
        AutoConfig.register(config.model_type, config)
    elif CONFIG_MAPPING[config.model_type] is not config:
        logger.info(
            "the model type %r belongs to %s: AutoConfig stays with that, use %s by its name",
            config.model_type,
            CONFIG_MAPPING[config.model_type],
            causal_lm.__name__,
        )
    AutoModel.register(config, causal_lm.model_class, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
