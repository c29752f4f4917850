"""An installed FLA (0.6 or later) served by this package: as one of FLA's own backends where FLA has a registry for a
function, else by replacing the function.

Calls with CPU and NPU tensors are served; all others go on as before. What has only a CPU's name below runs on Ascend
by FLA's own kernels, and on a CPU not at all without this package.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fla_npu.integrations.report import Report, lock
from fla_npu.integrations.transformers import SERVED_DEVICES, load

BACKEND = "fla_npu"
PRIORITY = -1
"""Before FLA's own backends, which start at 0."""
CPU = ("cpu",)


@dataclass(frozen=True)
class _Target:
    function: str
    """`module:name` of what serves it."""
    devices: tuple[str, ...] = SERVED_DEVICES
    registry: str | None = None
    """Name of FLA's registry, `""` for the function's own, None if FLA has none."""


TARGETS: dict[str, dict[str, _Target]] = {
    "fla.ops.gated_delta_rule.chunk": {
        "chunk_gated_delta_rule": _Target(
            "fla_npu.ops.gated_delta_rule:chunk_gated_delta_rule", registry="gated_delta_rule"
        )
    },
    "fla.ops.gated_delta_rule.fused_recurrent": {
        "fused_recurrent_gated_delta_rule_fwd": _Target("fla_npu.integrations.fla_backend:recurrent_gdn_forward")
    },
    "fla.ops.kda.chunk": {"chunk_kda": _Target("fla_npu.ops.kda:chunk_kda", registry="")},
    "fla.ops.kda.fused_recurrent": {
        "fused_recurrent_kda_fwd": _Target("fla_npu.ops.kda.fused_recurrent:fused_recurrent_kda_fwd", registry="kda")
    },
    "fla.ops.kda.gate": {"fused_kda_gate": _Target("fla_npu.ops.kda.gate:fused_kda_gate", CPU, "kda")},
    # On Ascend, FLA has kernels for these and this package has none.
    "fla.ops.gdn2.chunk": {"chunk_gdn2": _Target("fla_npu.ops.gdn2:chunk_gdn2", CPU)},
    "fla.ops.gdn2.fused_recurrent": {
        "fused_recurrent_gdn2": _Target("fla_npu.ops.gdn2:fused_recurrent_gdn2", CPU),
    },
    "fla.ops.gated_delta_product.chunk": {
        "chunk_gated_delta_product": _Target("fla_npu.ops.gated_delta_product:chunk_gated_delta_product", CPU)
    },
    "fla.modules.norm.fused_norm_gate": {
        "rms_norm_gated": _Target("fla_npu.modules.norm.fused_norm_gate:rms_norm_gated", CPU)
    },
    "fla.modules.norm.layernorm": {"rms_norm": _Target("fla_npu.modules.norm.layernorm:rms_norm", CPU)},
    "fla.modules.norm.l2norm": {"l2norm": _Target("fla_npu.modules.norm.l2norm:l2norm", CPU)},
    "fla.modules.causal_conv1d.ops": {
        "causal_conv1d": _Target("fla_npu.modules.causal_conv1d:causal_conv1d", CPU),
        "causal_conv1d_update": _Target("fla_npu.modules.causal_conv1d:causal_conv1d_update", CPU),
    },
    "fla.modules.activations.ops": {
        "swiglu": _Target("fla_npu.modules.activations:swiglu", CPU),
        "swiglu_linear": _Target("fla_npu.modules.activations:swiglu_linear", CPU),
    },
    "fla.modules.fused_linear_cross_entropy.ops": {
        "fused_linear_cross_entropy_loss": _Target(
            "fla_npu.modules.fused_linear_cross_entropy:fused_linear_cross_entropy_loss", CPU
        )
    },
}
"""FLA's module -> its function -> what serves it."""


def recurrent_gdn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """`fused_recurrent_gated_delta_rule` as FLA calls its kernel: with `A_log` the gate is computed inside."""
    from fla_npu.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return fused_recurrent_gated_delta_rule(q, k, v, use_gate_in_kernel=options.get("A_log") is not None, **options)


@dataclass(eq=False)
class FlaHook:
    """What is registered with FLA and replaced in it, to be extended and undone."""

    report: Report
    _registries: list[tuple[dict[str, Any], set[str]]] = field(default_factory=list)
    """Backends of FLA's registries, and what those have logged."""
    _replaced: list[tuple[Any, Any]] = field(default_factory=list)
    """`(original, replacement)`."""
    _attached: dict[str, ModuleSpec | None] = field(default_factory=dict)
    """Module -> its spec, which is another one when it is loaded again."""

    def extend(self) -> None:
        """`attach` to every module of FLA that is imported."""
        for name in TARGETS:
            module = sys.modules.get(name)
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                importlib.import_module(name)
            if module is not None:
                self.attach(module)

    def attach(self, module: ModuleType) -> None:
        """Serve what a module of FLA defines."""
        with lock:
            name = module.__name__
            backends = sys.modules.get("fla.backends")
            known = name in self._attached and self._attached[name] is module.__spec__
            if known or not name.startswith("fla.") or backends is None:
                return
            self._attached[name] = module.__spec__
            for function, target in TARGETS[name].items():
                original = vars(module).get(function)
                if original is None:
                    self.report.skipped[f"{name}.{function}"] = "this FLA has no such function"
                elif target.registry is not None:
                    try:
                        self._register(backends, original, function, target)
                    except (AttributeError, KeyError, TypeError) as error:
                        # Private parts of FLA, which a later version may have changed.
                        reason = f"this FLA registers backends in another way: {error!r}"
                        self.report.skipped[f"{name}.{function}"] = reason
                else:
                    self._replace(original, _served(function, original, target, self.report))
                    self.report.patched.append(f"{name}.{function}")

    def undo(self) -> None:
        """Take the backends out of FLA's registries and put the original functions back."""
        with lock:
            for backends, logged in self._registries:
                backends.pop(BACKEND, None)
                logged -= {entry for entry in logged if f":{BACKEND}" in entry}
            for original, replacement in self._replaced:
                _exchange(replacement, original)
            self._registries.clear()
            self._replaced.clear()
            self._attached.clear()

    def _register(self, backends: ModuleType, original: Any, function: str, target: _Target) -> None:
        if backends._DISPATCH_DISABLED:
            self.report.skipped[f"{original.__module__}.{function}"] = "FLA_DISABLE_BACKEND_DISPATCH is set"
            return
        if target.registry:
            registry = backends._operation_registries[target.registry]
        else:
            registry = backends._function_registries[inspect.unwrap(original)]
        if BACKEND not in registry._backends:
            self._registries.append((registry._backends, registry._logged))
            body = {"backend_type": BACKEND, "priority": PRIORITY}
            registry.register(type("FlaNpuBackend", (backends.BaseBackend,), body)())
        backend = registry._backends[BACKEND]
        implementation = load(target.function)

        def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return _accepts(target, args, kwargs), f"fla_npu serves it on {' and '.join(target.devices)}"

        @functools.wraps(implementation)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.report.count(function)
            return implementation(*args, **kwargs)

        setattr(backend, f"{function}_verifier", verify)
        setattr(backend, function, run)
        self.report.patched.append(f"{original.__module__}.{function}")

    def _replace(self, original: Any, replacement: Any) -> None:
        _exchange(original, replacement)
        self._replaced.append((original, replacement))


def _served(function: str, original: Callable[..., Any], target: _Target, report: Report) -> Callable[..., Any]:
    implementation = load(target.function)

    @functools.wraps(original)
    def served(*args: Any, **kwargs: Any) -> Any:
        if not _accepts(target, args, kwargs):
            report.count_delegated(function)
            return original(*args, **kwargs)
        report.count(function)
        return implementation(*args, **kwargs)

    return served


def _accepts(target: _Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the input is on a device that is served, and nothing is asked for that this package refuses."""
    first = args[0] if args else next((kwargs[name] for name in ("q", "x", "g") if name in kwargs), None)
    if not isinstance(first, torch.Tensor):
        return False  # FLA says what is missing
    return first.device.type in target.devices and kwargs.get("cp_context") is None


def _exchange(old: Any, new: Any) -> None:
    """`old` for `new` in all modules of FLA: they import functions from each other by name."""
    for name, module in list(sys.modules.items()):
        if name == "fla" or name.startswith("fla."):
            for key in [key for key, value in list(vars(module).items()) if value is old]:
                setattr(module, key, new)
