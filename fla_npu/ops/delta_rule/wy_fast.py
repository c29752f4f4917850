"""Empty: FLA's module of this name holds steps between its kernels, which the ops here do not have."""

from fla_npu.ops.utils.internals import steps_between_kernels

__getattr__ = steps_between_kernels(__name__, "fla_npu.ops.delta_rule.chunk_delta_rule")
