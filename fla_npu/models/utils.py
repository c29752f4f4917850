"""FLA's path of the state cache and, with transformers, of the generation classes."""

from fla_npu.models.cache_utils import Cache, FLACache, FLALayer, LegacyFLACache

__all__ = ["Cache", "FLACache", "FLALayer", "LegacyFLACache"]

try:
    from fla_npu.models.generation_utils import FLAGenerationMixin, FLAUnsupportedCacheGenerationMixin
except ImportError:
    pass
else:
    __all__ += ["FLAGenerationMixin", "FLAUnsupportedCacheGenerationMixin"]
