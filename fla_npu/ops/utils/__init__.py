"""Utilities of `fla.ops.utils` that the delta-rule ops and their callers use."""

from fla_npu.ops.utils.cumsum import chunk_global_cumsum, chunk_local_cumsum
from fla_npu.ops.utils.index import (
    get_max_num_splits,
    prepare_chunk_indices,
    prepare_chunk_indices_static,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_lens,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
)
from fla_npu.ops.utils.logsumexp import logsumexp_fwd
from fla_npu.ops.utils.matmul import addmm, matmul
from fla_npu.ops.utils.pack import pack_sequence, unpack_sequence
from fla_npu.ops.utils.pooling import mean_pooling
from fla_npu.ops.utils.softmax import softmax_bwd, softmax_fwd
from fla_npu.ops.utils.solve_tril import solve_tril

__all__ = [
    "addmm",
    "chunk_global_cumsum",
    "chunk_local_cumsum",
    "get_max_num_splits",
    "logsumexp_fwd",
    "matmul",
    "mean_pooling",
    "pack_sequence",
    "prepare_chunk_indices",
    "prepare_chunk_indices_static",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_lens",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "softmax_bwd",
    "softmax_fwd",
    "solve_tril",
    "unpack_sequence",
]
