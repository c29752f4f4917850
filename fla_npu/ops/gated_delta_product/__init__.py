"""Gated DeltaProduct: the gated delta rule with several updates of the state per token."""

from fla_npu.ops.gated_delta_product.chunk import chunk_gated_delta_product

__all__ = ["chunk_gated_delta_product"]
