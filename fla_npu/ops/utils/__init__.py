"""Utilities of `fla.ops.utils`, under the same names, and what several packages here need for FLA's sake."""

from fla_npu.ops.utils.cumsum import (
    chunk_global_cumsum,
    chunk_global_cumsum_scalar,
    chunk_global_cumsum_vector,
    chunk_local_cumsum,
    chunk_local_cumsum_scalar,
    chunk_local_cumsum_vector,
)
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
from fla_npu.ops.utils.sinkhorn import sinkhorn
from fla_npu.ops.utils.softmax import softmax_bwd, softmax_fwd
from fla_npu.ops.utils.softplus import softplus
from fla_npu.ops.utils.solve_tril import solve_tril

__all__ = [
    "addmm",
    "chunk_global_cumsum",
    "chunk_global_cumsum_scalar",
    "chunk_global_cumsum_vector",
    "chunk_local_cumsum",
    "chunk_local_cumsum_scalar",
    "chunk_local_cumsum_vector",
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
    "sinkhorn",
    "softmax_bwd",
    "softmax_fwd",
    "softplus",
    "solve_tril",
    "unpack_sequence",
]
