"""FLA's module of this name holds steps between its kernels, which have no counterpart here."""

from fla_npu.ops.utils.internals import without_counterpart

__getattr__ = without_counterpart(
    __name__, "chunk_gated_delta_rule_fwd_intra", instead="fla_npu.ops.gated_delta_rule.chunk_gated_delta_rule"
)
