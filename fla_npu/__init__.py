"""fla_npu: the Flash Linear Attention API for Huawei Ascend NPUs, and fast on any CPU."""

from fla_npu._version import __version__

__all__ = ["__version__"]
