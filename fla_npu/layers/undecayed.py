"""The mark of parameters that weight decay leaves alone."""

from collections.abc import Callable
from typing import Any

import torch.nn as nn


class UndecayedParameters(nn.Module):
    """A module whose parameters named in `undecayed` have the attribute `_no_weight_decay = True`, which FLA's training
    recipes look for.

    They have it after a checkpoint was loaded, a conversion, a copy and unpickling, too: these make parameters anew.
    Nor is the mark there before a parameter is registered, since transformers before version 5 makes them anew then,
    from the attributes that they have, and fails on those of its users.
    """

    undecayed: tuple[str, ...] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _mark(self) -> None:
        for name in self.undecayed:
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]
