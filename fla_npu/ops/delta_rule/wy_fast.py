"""FLA's module of this name holds steps between its kernels, which have no counterpart here."""

from fla_npu.ops.utils.internals import without_counterpart

__getattr__ = without_counterpart(
    __name__,
    "prepare_wy_repr_fwd",
    "recompute_w_u_fwd",
    "prepare_wy_repr_bwd",
    instead="fla_npu.ops.delta_rule.chunk_delta_rule",
)
