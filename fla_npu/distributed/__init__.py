"""Models on several devices. Imports `torch.distributed.tensor`, which `import fla_npu` does not."""

from fla_npu.distributed.tensor_parallel import HeadParallel, parallelize

__all__ = ["HeadParallel", "parallelize"]
