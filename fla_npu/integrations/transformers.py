"""The hook into transformers: its linear-attention layers call this package's ops while the hook is on.

The layers of transformers call four functions that they look up, at every call, in the globals of their own modeling
module. `enable()` rebinds those globals in every modeling module that is imported at that moment, so it works on
models that are already built; import (or build, or load) the model first. `disable()` puts the original objects back.
This holds for transformers 5.15 and later; older versions bind the functions when a layer is built.

    from fla_npu.integrations.transformers import enabled

    model = AutoModelForCausalLM.from_pretrained(folder)
    with enabled() as report:
        model.generate(...)
    report.calls          # Counter({'fused_recurrent_gated_delta_rule': 15, 'chunk_gated_delta_rule': 6})

This file imports transformers only when a hook is asked for.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from fla_npu.errors import MissingExtraError

TARGETS = {
    "torch_chunk_gated_delta_rule": "fla_npu.ops.gated_delta_rule:chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fla_npu.ops.gated_delta_rule:fused_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "fla_npu.ops.kda:chunk_kda",
    "recurrent_kimi_delta_attention": "fla_npu.ops.kda:fused_recurrent_kda",
}
"""Global of a modeling module -> the op of this package that serves it."""

SERVED_DEVICES = ("cpu", "npu")


@dataclass
class Report:
    """What a hook replaced and how often each op ran since."""

    patched: list[str] = field(default_factory=list)
    """`<modeling module>.<global>`, in the order of replacement."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls served, by op name. Calls inside a graph compiled by `torch.compile` are not counted."""
    delegated: Counter[str] = field(default_factory=Counter)
    """Calls passed on to the replaced function (another device, or `torch.export`), by the name of that function."""


@dataclass
class _Patch:
    module: ModuleType
    name: str
    original: Callable[..., Any]
    replacement: Callable[..., Any]


class _Hook:
    """One set of replacements that can be extended and undone."""

    def __init__(self, make: Callable[[str, Callable[..., Any], Report], Callable[..., Any]]) -> None:
        self.make = make
        self.report = Report()
        self.patches: list[_Patch] = []

    def extend(self) -> None:
        """Replace the targets in every imported modeling module that this hook has not replaced yet."""
        if self not in _live:
            _live.append(self)
        replaced = {(patch.module.__name__, patch.name) for patch in self.patches}
        for module in _modeling_modules():
            for name in TARGETS:
                original = vars(module).get(name)
                if original is None or (module.__name__, name) in replaced:
                    continue
                patch = _Patch(module, name, original, self.make(name, original, self.report))
                setattr(module, name, patch.replacement)
                self.patches.append(patch)
                self.report.patched.append(f"{module.__name__}.{name}")

    def undo(self) -> None:
        """Put the originals back. Where another hook was laid over this one, it gets the original to put back."""
        for patch in self.patches:
            if vars(patch.module).get(patch.name) is patch.replacement:
                setattr(patch.module, patch.name, patch.original)
            for later in _live:
                for over in later.patches:
                    if over.original is patch.replacement:
                        over.original = patch.original
        self.patches.clear()
        if self in _live:
            _live.remove(self)


_lock = threading.RLock()
_live: list[_Hook] = []
"""Hooks with replacements in place, oldest first."""
_active: _Hook | None = None
_users = 0
"""`enabled()` blocks that are open, in all threads."""
_kept_on = False
"""Whether `enable()` was called outside of such a block."""


def enable() -> Report:
    """Serve the linear-attention calls of every imported transformers model with this package's ops.

    Idempotent: a second call only adds modeling modules that were imported in between, and returns the same report.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    global _kept_on
    _require_transformers()
    with _lock:
        _kept_on = True
        return _extend().report


def disable() -> None:
    """Undo `enable()`, also inside `enabled()` blocks. Does nothing when the hook is off."""
    global _active, _kept_on
    with _lock:
        _kept_on = False
        if _active is not None:
            _active.undo()
            _active = None


def _extend() -> _Hook:
    global _active
    if _active is None:
        _active = _Hook(_serve)
    _active.extend()
    return _active


@contextmanager
def enabled() -> Iterator[Report]:
    """`enable()` for the length of a `with` block, or longer if another block or an `enable()` keeps the hook on."""
    global _users
    _require_transformers()
    with _lock:
        _users += 1
        report = _extend().report
    try:
        yield report
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and not _kept_on:
                disable()


@contextmanager
def torch_path() -> Iterator[Report]:
    """Run transformers' own torch functions in this block, whatever else would serve the calls.

    Without this package, transformers looks for an installed `fla` when a modeling file is imported; comparisons that
    mean "transformers' plain torch code" have to step past that, and past `enable()`.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    _require_transformers()
    hook = _Hook(_unwrapped)
    with _lock:
        hook.extend()
    try:
        yield hook.report
    finally:
        with _lock:
            hook.undo()


def _require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("transformers", "transformers")


def _modeling_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name and isinstance(module, ModuleType)
    ]


def _serve(name: str, original: Callable[..., Any], report: Report) -> Callable[..., Any]:
    """A stand-in for `original` that runs the op of `TARGETS[name]`.

    The layers pass every leftover keyword of the model's `forward`; as transformers does for FLA, only those that the
    op's signature names are passed on.
    """
    from transformers.utils.import_utils import is_torchdynamo_exporting

    module_name, op_name = TARGETS[name].split(":")
    op = getattr(importlib.import_module(module_name), op_name)
    named = frozenset(
        parameter.name
        for parameter in inspect.signature(op).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )

    @functools.wraps(original)
    def serve(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or query.device.type not in SERVED_DEVICES or is_torchdynamo_exporting():
            # Positional arguments beyond q, k, v would mean a caller that this hook does not know: their order differs
            # between transformers and FLA.
            report.delegated[name] += 1
            return original(query, key, value, *args, **kwargs)
        if not torch.compiler.is_compiling():
            # A compiled graph would be specialised on the count and recompiled at every call.
            report.calls[op_name] += 1
        return op(query, key, value, **{option: setting for option, setting in kwargs.items() if option in named})

    return serve


def _unwrapped(name: str, original: Callable[..., Any], report: Report) -> Callable[..., Any]:
    """The torch function that transformers decorated, counted."""
    torch_function = inspect.unwrap(original)

    @functools.wraps(torch_function)
    def run(*args: Any, **kwargs: Any) -> Any:
        report.calls[name] += 1
        return torch_function(*args, **kwargs)

    return run
