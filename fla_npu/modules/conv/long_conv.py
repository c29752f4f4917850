"""Older path of `fla_npu.modules.long_conv`."""

from fla_npu.modules.long_conv import ImplicitLongConvolution, LongConvolution, PositionalEmbedding, fft_conv

__all__ = ["ImplicitLongConvolution", "LongConvolution", "PositionalEmbedding", "fft_conv"]
