"""A Triton kernel's launches on torch CPU tensors, through the vendor's compiler and the simulator."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fla_npu.compiler.api import Compiled, compile_build
from fla_npu.compiler.build import COMPILER_FLAGS, FRONT_END_OPTIONS, KernelBuild
from fla_npu.compiler.lower import Lowerer
from fla_npu.compiler.simulate import Statistics, simulate

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
}


class SimulatedKernel:
    """Takes the place of a `@triton.jit` function: `kernel[grid](...)` compiles for a chip and simulates.

    Args:
        kernel: what `KernelBuild` takes, `module:function` or `file.py:function`.
        names: the function's arguments in order.
        constants: those of them that are `tl.constexpr`.
        chip: the chip to compile for.
        schedule, check_hazards: see `simulate`.
    """

    def __init__(
        self,
        kernel: str,
        names: Sequence[str],
        constants: Sequence[str],
        chip: str = "910B3",
        schedule: str = "round_robin",
        check_hazards: bool = True,
    ) -> None:
        self.kernel, self.names, self.constants, self.chip = kernel, tuple(names), frozenset(constants), chip
        self.schedule, self.check_hazards = schedule, check_hazards
        self.compiled: dict[KernelBuild, Compiled] = {}
        self.statistics: list[Statistics] = []
        self._lowerer = Lowerer()

    @classmethod
    def of(cls, function: Any, **settings: Any) -> "SimulatedKernel":
        """The stand-in for a jitted function of an importable module."""
        fixed = [parameter.name for parameter in function.params if parameter.is_constexpr]
        return cls(f"{function.fn.__module__}:{function.fn.__name__}", function.arg_names, fixed, **settings)

    def close(self) -> None:
        """Ends the front end's process."""
        self._lowerer.close()

    def __getitem__(self, grid: Sequence[int]) -> Any:
        return lambda *args, **kwargs: self.launch(tuple(grid), args, kwargs)

    def launch(self, grid: tuple[int, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """One launch; tensors are changed in place.

        Raises:
            ValueError: an argument or option is not known, or the compiler refuses the kernel.
            SimulationError: see `simulate`.
        """
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        options = {name: given.pop(name) for name in list(given) if name not in self.names}
        unknown = sorted(set(options) - set(COMPILER_FLAGS) - FRONT_END_OPTIONS)
        missing = [name for name in self.names if name not in given]
        if unknown or missing:
            raise ValueError(f"launch of {self.kernel}: unknown {unknown}, missing {missing}")
        fixed = {name: value for name, value in given.items() if name in self.constants or value is None}
        passed = [name for name in self.names if name not in fixed]
        signature = {name: kind_of(given[name], name) for name in passed}
        build = KernelBuild(f"simulated-{self.kernel}", self.kernel, signature, fixed, options)
        if build not in self.compiled:
            self.compiled[build] = compile_build(build, self.chip, lowerer=self._lowerer)
        compiled = self.compiled[build]
        order = [given[name] for name in compiled.arguments]
        arguments = [memory_of(value) if isinstance(value, torch.Tensor) else value for value in order]
        self.statistics.append(simulate(compiled.module, arguments, grid, self.schedule, self.check_hazards))


def kind_of(value: Any, name: str) -> str:
    """The type of an argument in a `KernelBuild`'s signature."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in _TYPES or value.device.type != "cpu":
            raise ValueError(f"{name} must be a CPU tensor of a type that kernels take, got {value.dtype}")
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise ValueError(f"{name} must be a tensor or a number, got {type(value).__name__}")


def memory_of(tensor: torch.Tensor) -> Any:
    """A flat numpy array of a tensor's memory, from its first element to its last; bf16 as its bits."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    count = last + 1 if tensor.numel() else 0
    flat = tensor.detach().as_strided((count,), (1,))
    return flat.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else flat.numpy()
