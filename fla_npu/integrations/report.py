"""What `fla_npu.enable()` did, and what ran since."""

import threading
from collections import Counter
from dataclasses import dataclass, field

import torch

lock = threading.RLock()
"""Held while objects are replaced or put back."""


@dataclass
class Report:
    """What is served by this package while it is enabled. Grows when further modules are imported."""

    routes: dict[str, str] = field(default_factory=dict)
    """`transformers`, `fla`, `causal_conv1d` -> how this package is reached through it."""
    patched: list[str] = field(default_factory=list)
    """`<module>.<name>` of every object replaced, in that order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What was left alone -> why."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls served, by name: a call from transformers under the name of this package's op or convolution, a call from
    FLA under the name of FLA's function, and a call of a whole layer or norm of transformers under that of its class,
    where the op inside counts too. Calls of this package itself are not counted, and those through the name `fla` where
    FLA is not installed are such. Nor are those within a graph compiled by `torch.compile`: it would be specialised on
    the count and recompiled at every call."""
    delegated: Counter[str] = field(default_factory=Counter)
    """Calls passed on to the replaced function (another device, or `torch.export`), by the name of that function."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, name: str) -> None:
        """One more call served by `name`."""
        if not torch.compiler.is_compiling():
            with self._lock:
                self.calls[name] += 1

    def count_delegated(self, name: str) -> None:
        """One more call left to the replaced function `name`."""
        if not torch.compiler.is_compiling():
            with self._lock:
                self.delegated[name] += 1
