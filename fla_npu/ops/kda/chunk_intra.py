"""FLA's module of this name holds steps between its kernels, which have no counterpart here."""

from fla_npu.ops.utils.internals import without_counterpart

__getattr__ = without_counterpart(
    __name__, "chunk_kda_fwd_intra", "chunk_kda_bwd_intra", instead="fla_npu.ops.kda.chunk_kda"
)
