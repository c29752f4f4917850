"""Triton kernels of the modules. Nothing here may be imported before a tensor on an NPU is at hand: `launch.py`."""
