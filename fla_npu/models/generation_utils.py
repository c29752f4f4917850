"""Generation of models whose cache is `fla_npu.models.utils.Cache`."""

from transformers.generation import GenerationMixin


class FLAGenerationMixin(GenerationMixin):
    """`generate` that lets the model make its cache: transformers' own holds no recurrent states."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


FLAUnsupportedCacheGenerationMixin = FLAGenerationMixin
"""FLA's name in models that it does not expect to support every decoding strategy."""
