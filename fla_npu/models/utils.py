"""FLA's path of the state cache."""

from fla_npu.models.cache_utils import Cache, FLACache, FLALayer

__all__ = ["Cache", "FLACache", "FLALayer"]
