"""Memory that every chunk of a call uses again."""

import math
from collections.abc import Callable

import torch


class Workspace:
    """Buffers by name.

    Fresh memory for the large temporaries of each chunk costs as much as computing them: the C library returns it to
    the system in between, and every page is faulted in anew (measured: a third of the run time of a forward pass).

    Args:
        like: gives the device.
        dtype: of all buffers.
    """

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        self._device, self._dtype = like.device, dtype
        self._buffers: dict[str, torch.Tensor] = {}
        self._shaped: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._constants: dict[tuple[str, int], torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A contiguous tensor of this shape with any content. The one taken under this name before is gone."""
        shaped = self._shaped.get((name, shape))
        if shaped is None:
            size = math.prod(shape)
            buffer = self._buffers.get(name)
            if buffer is None or buffer.numel() < size:
                buffer = self._buffers[name] = torch.empty(size, device=self._device, dtype=self._dtype)
            shaped = self._shaped[name, shape] = buffer[:size].view(shape)
        return shaped

    def constant(self, name: str, size: int, make: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """A matrix that depends on its size only: `make(size, like)`, once per call of an op.

        Not once per process, since a call under `torch.compile` or `torch.func` must not hand its tensors to the next.
        """
        constant = self._constants.get((name, size))
        if constant is None:
            like = torch.empty(0, device=self._device, dtype=self._dtype)
            constant = self._constants[name, size] = make(size, like)
        return constant
