"""transformers' linear-attention layers, served by this package's ops.

The layers call functions that they look up in the globals of their own modeling module: at every call since
transformers 5.15, when a layer is built before that (and then from the layer). A hook rebinds those globals in every
modeling module, and where layers keep the functions, in the layers that exist; undoing it puts the very same objects
back.

`fla_npu.enable()` lays one hook over all modeling modules, imported or to come; `torch_path()` lays another one for
comparisons. This file imports transformers only when a hook is asked for.
"""

import functools
import importlib
import importlib.util
import inspect
import itertools
import operator
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fla_npu.errors import MissingExtraError
from fla_npu.integrations.instances import instances
from fla_npu.integrations.report import Report, lock

MODELING = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
"""Names of transformers' modeling modules."""

CHUNK_GDN = "fla_npu.ops.gated_delta_rule:chunk_gated_delta_rule"
RECURRENT_GDN = "fla_npu.ops.gated_delta_rule:fused_recurrent_gated_delta_rule"
OPS = {
    "torch_chunk_gated_delta_rule": CHUNK_GDN,
    "torch_recurrent_gated_delta_rule": RECURRENT_GDN,
    "chunk_kimi_delta_attention": "fla_npu.ops.kda:chunk_kda",
    "recurrent_kimi_delta_attention": "fla_npu.ops.kda:fused_recurrent_kda",
    # FLA's functions, where transformers up to 5.14 found FLA and a GPU; None otherwise.
    "chunk_gated_delta_rule": CHUNK_GDN,
    "fused_recurrent_gated_delta_rule": RECURRENT_GDN,
}
"""Global of a modeling module -> the op of this package that serves it."""

CONVOLUTIONS = {
    "causal_conv1d_fn": "fla_npu.integrations.causal_conv1d:causal_conv1d_fn",
    "causal_conv1d_update": "fla_npu.integrations.causal_conv1d:causal_conv1d_update",
    "torch_causal_conv1d_update": "fla_npu.integrations.causal_conv1d:causal_conv1d_update",
}
"""The same for the short convolution; replaced only in modeling modules that have one of the ops."""

PACKED = ("seq_idx", "cu_seq_lens_q")
"""Keywords that tell the convolution of packed sequences."""

OP_NAMES = frozenset(target.split(":")[1] for target in OPS.values())
"""Names under which `Report.calls` counts calls of linear attention."""

KEPT_BY_LAYERS = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "recurrent_gated_delta_rule",
    "causal_conv1d_fn": "causal_conv1d_fn",
    "torch_causal_conv1d_update": "causal_conv1d_update",
    "causal_conv1d_update": "causal_conv1d_update",
}
"""Global -> attribute in which a layer of transformers up to 5.14 keeps what it found there."""

SERVED_DEVICES = ("cpu", "npu")

Maker = Callable[[str, Any, Report], Any]
"""`(name of the global, original, report)` -> replacement, or the original itself to leave it."""


@dataclass(eq=False)
class _Patch:
    module: ModuleType
    spec: ModuleSpec | None
    """Of the module; another one when it is reloaded."""
    name: str
    original: Any
    replacement: Any
    order: int = field(default_factory=itertools.count().__next__)
    """Later patches lie over earlier ones."""


@dataclass(eq=False)
class Hook:
    """One set of replacements in modeling modules that can be extended and undone."""

    make: Maker
    report: Report
    patches: list[_Patch] = field(default_factory=list)

    def extend(self) -> None:
        """`attach` to every imported modeling module."""
        modules = [
            module
            for name, module in list(sys.modules.items())
            if MODELING.fullmatch(name) and isinstance(module, ModuleType)
        ]
        for module in modules:
            if getattr(module.__spec__, "_initializing", False):
                # Another thread is importing it, or this one: the former can be waited for.
                importlib.import_module(module.__name__)
        with lock:
            if self not in _live:
                _live.append(self)
            for module in modules:
                self.attach(module)

    def attach(self, module: ModuleType) -> None:
        """Replace the targets in a modeling module, those that this hook has not replaced yet."""
        with lock:
            if not any(callable(vars(module).get(name)) for name in OPS):
                return
            # Reloading a module has undone what was replaced in it.
            self.patches = [p for p in self.patches if p.module is not module or p.spec is module.__spec__]
            replaced = {patch.name for patch in self.patches if patch.module is module}
            new = []
            for name in (*OPS, *CONVOLUTIONS, "is_fast_path_available"):
                if name not in vars(module) or name in replaced:
                    continue
                original = vars(module)[name]
                replacement = self.make(name, original, self.report)
                if replacement is not original:
                    if original is None:
                        # Layers that keep it are pickled with that name: None again where nothing is enabled.
                        replacement.__module__, replacement.__qualname__ = module.__name__, name
                    setattr(module, name, replacement)
                    new.append(_Patch(module, module.__spec__, name, original, replacement))
                    self.report.patched.append(f"{module.__name__}.{name}")
            self.patches += new
            if _layers_keep_functions(module):
                _exchange(module, [(KEPT_BY_LAYERS.get(p.name), p.original, p.replacement) for p in new])

    def undo(self) -> None:
        """Put the originals back. Where another hook was laid over this one, it gets the original to put back."""
        with lock:
            for patch in self.patches:
                over = [
                    p
                    for hook in _live
                    for p in hook.patches
                    if p.module is patch.module and p.name == patch.name and p.order > patch.order
                ]
                if over:
                    min(over, key=lambda p: p.order).original = patch.original
                elif vars(patch.module).get(patch.name) is patch.replacement:
                    setattr(patch.module, patch.name, patch.original)
            for module in {patch.module.__name__: patch.module for patch in self.patches}.values():
                if _layers_keep_functions(module):
                    mine = [p for p in self.patches if p.module is module]
                    _exchange(module, [(KEPT_BY_LAYERS.get(p.name), p.replacement, p.original) for p in mine])
            self.patches.clear()
            if self in _live:
                _live.remove(self)


_live: list[Hook] = []
"""Hooks with replacements in place, oldest first."""


def _layers_keep_functions(module: ModuleType) -> bool:
    return "is_fast_path_available" in vars(module)


def _exchange(module: ModuleType, changes: list[tuple[str | None, Any, Any]]) -> None:
    """In all layers of a modeling module, attributes `(name, old, new)` from old to new."""
    classes = tuple(
        c
        for c in vars(module).values()
        if inspect.isclass(c) and issubclass(c, torch.nn.Module) and c.__module__ == module.__name__
    )
    for layer in instances(lambda cls: issubclass(cls, classes)):
        for name in {name for name, *_ in changes if name in vars(layer)}:
            held = vars(layer)[name]
            for new in [new for changed, old, new in changes if changed == name and old is held][:1]:
                vars(layer)[name] = new


def serve(name: str, original: Any, report: Report) -> Any:
    """A stand-in for `original` that runs this package's function for it."""
    if name == "is_fast_path_available":
        return True
    if name in OPS:
        return None if original is None else _serve_op(name, original, report)
    if original is None and name != "causal_conv1d_fn":
        return None  # the torch twin is replaced, which layers take then
    return _serve_convolution(name, original, report)


def _serve_op(name: str, original: Callable[..., Any], report: Report) -> Callable[..., Any]:
    """The layers pass every leftover keyword of the model's `forward`; as transformers does for FLA, only those that
    the op's signature names are passed on.
    """
    from transformers.utils.import_utils import is_torchdynamo_exporting

    op = load(OPS[name])
    named = _keywords(op)

    @functools.wraps(original)
    def served(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or query.device.type not in SERVED_DEVICES or is_torchdynamo_exporting():
            # Positional arguments beyond q, k, v would mean a caller that this hook does not know: their order differs
            # between transformers and FLA.
            report.count_delegated(name)
            return original(query, key, value, *args, **kwargs)
        report.count(op.__name__)
        return op(query, key, value, **{option: setting for option, setting in kwargs.items() if option in named})

    return served


def _serve_convolution(name: str, original: Callable[..., Any] | None, report: Report) -> Callable[..., Any]:
    """In transformers up to 5.14, `causal_conv1d_fn` is None without the package; then there is none to delegate to."""
    from transformers.utils.import_utils import is_torchdynamo_exporting

    from fla_npu.modules.causal_conv1d.ops import ACTIVATIONS

    function = load(CONVOLUTIONS[name])
    named = _keywords(function)
    # x, weight, bias; or x, conv_state, weight, bias, activation. Further on the order differs between callers.
    positions = 2 if function.__name__ == "causal_conv1d_fn" else 4

    def served(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        activation = args[3] if len(args) == 4 else kwargs.get("activation")
        known = len(args) <= positions and x.device.type in SERVED_DEVICES and activation in ACTIVATIONS
        if known and torch.compiler.is_compiling():
            # A compiler fuses transformers' convolution; this package's would break the graph.
            known = any(kwargs.get(bounds) is not None for bounds in PACKED)
        if original is not None and (not known or is_torchdynamo_exporting()):
            report.count_delegated(name)
            return original(x, *args, **kwargs)
        report.count(function.__name__)
        return function(x, *args, **{option: setting for option, setting in kwargs.items() if option in named})

    if original is None:
        served.__wrapped__ = None  # type: ignore[attr-defined]  # for `torch_path`, which unwraps
        return served
    return functools.wraps(original)(served)


def _unwrapped(name: str, original: Any, report: Report) -> Any:
    """The torch function that transformers decorated; those of the ops counted."""
    if name == "is_fast_path_available":
        return original
    torch_function = inspect.unwrap(original)
    if name not in OPS or torch_function is None:
        return torch_function

    @functools.wraps(torch_function)
    def run(*args: Any, **kwargs: Any) -> Any:
        report.count(name)
        return torch_function(*args, **kwargs)

    return run


@contextmanager
def torch_path() -> Iterator[Report]:
    """Run transformers' own torch functions in this block, whatever else would serve the calls.

    Without this package, transformers looks for an installed `fla` when a modeling file is imported; comparisons that
    mean "transformers' plain torch code" have to step past that, and past `fla_npu.enable()`.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("transformers", "transformers")
    hook = Hook(_unwrapped, Report())
    hook.extend()
    try:
        yield hook.report
    finally:
        hook.undo()


def load(target: str) -> Callable[..., Any]:
    """The function named `<module>:<name>`, or `<module>:<class>.<name>`."""
    module, name = target.split(":")
    function: Callable[..., Any] = operator.attrgetter(name)(importlib.import_module(module))
    return function


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )
