"""An installed FLA (0.6 or later) served by this package: as one of FLA's own backends where FLA has a registry for a
function, else by replacing the function.

Calls with CPU and NPU tensors are served; all others go on as before. What has only a CPU's name below runs on Ascend
by FLA's own kernels, and on a CPU not at all without this package. A function that is replaced is so in every module
that has imported it; one that is registered is served wherever it is kept.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fla_npu.integrations.report import Report, lock
from fla_npu.integrations.transformers import SERVED_DEVICES, load
from fla_npu.modules import activations

BACKEND = "fla_npu"
PRIORITY = -1
"""Before FLA's own backends, which start at 0."""
CPU = ("cpu",)
OWN = ""
REFUSED = ("cp_context", "process_group")
"""Options of several devices, which this package does not have."""


@dataclass(frozen=True)
class _Target:
    devices: tuple[str, ...] = SERVED_DEVICES
    registry: str | None = None
    """Name of FLA's registry, `OWN` for the function's own, None if FLA has none."""
    function: str | None = None
    """`module:name` of what serves it; by default the function of the same path and name."""


def _cpu(*functions: str, registry: str | None = None) -> dict[str, _Target]:
    return {function: _Target(CPU, registry) for function in functions}


TARGETS: dict[str, dict[str, _Target]] = {
    "fla.ops.gated_delta_rule.chunk": {"chunk_gated_delta_rule": _Target(registry="gated_delta_rule")},
    "fla.ops.gated_delta_rule.fused_recurrent": {"fused_recurrent_gated_delta_rule_fwd": _Target()},
    "fla.ops.kda.chunk": {"chunk_kda": _Target(registry=OWN)},
    "fla.ops.kda.fused_recurrent": {"fused_recurrent_kda_fwd": _Target(registry="kda")},
    # On Ascend, FLA has kernels for these and this package has none.
    "fla.ops.gated_delta_rule.gate": _cpu("fused_gdn_gate"),
    "fla.ops.kda.gate": _cpu("fused_kda_gate", registry="kda"),
    "fla.ops.common.gate": _cpu("fused_beta_sigmoid"),
    "fla.ops.gdn2.chunk": _cpu("chunk_gdn2"),
    "fla.ops.gdn2.fused_recurrent": _cpu("fused_recurrent_gdn2"),
    "fla.ops.gated_delta_product.chunk": _cpu("chunk_gated_delta_product"),
    "fla.ops.delta_rule.chunk": _cpu("chunk_delta_rule"),
    "fla.ops.delta_rule.fused_recurrent": _cpu("fused_recurrent_delta_rule"),
    "fla.ops.gla.chunk": _cpu("chunk_gla"),
    "fla.ops.gla.fused_recurrent": _cpu("fused_recurrent_gla"),
    "fla.ops.simple_gla.chunk": _cpu("chunk_simple_gla"),
    "fla.ops.simple_gla.fused_chunk": _cpu("fused_chunk_simple_gla", registry=OWN),
    "fla.ops.simple_gla.fused_recurrent": _cpu("fused_recurrent_simple_gla", registry=OWN),
    "fla.ops.simple_gla.parallel": _cpu("parallel_simple_gla", registry=OWN),
    "fla.ops.retention.chunk": _cpu("chunk_retention"),
    "fla.ops.retention.fused_chunk": _cpu("fused_chunk_retention"),
    "fla.ops.retention.fused_recurrent": _cpu("fused_recurrent_retention"),
    "fla.ops.retention.parallel": _cpu("parallel_retention"),
    "fla.modules.norm.fused_norm_gate": _cpu(
        *("rms_norm_gated", "layer_norm_gated", "rms_norm_swish_gate_linear", "layer_norm_swish_gate_linear")
    ),
    "fla.modules.norm.layernorm": _cpu(
        *("rms_norm", "layer_norm", "group_norm", "rms_norm_linear", "layer_norm_linear", "group_norm_linear")
    ),
    "fla.modules.norm.layernorm_gated": _cpu("rmsnorm_fn", "layernorm_fn"),
    "fla.modules.norm.l2norm": _cpu("l2norm"),
    "fla.modules.rotary.ops": _cpu("rotary_embedding"),
    "fla.modules.causal_conv1d.ops": _cpu("causal_conv1d", "causal_conv1d_update"),
    "fla.modules.activations.ops": {
        **_cpu("swiglu", "swiglu_linear", "sigmoidglu", "sigmoidglu_linear", "powglu", "powglu_linear"),
        # Layers keep the activations of a table, so what these call is served.
        **{
            f"{activation}_{direction}": _Target(CPU, OWN, f"{__name__}:{activation}_{direction}")
            for activation in ("sigmoid", "logsigmoid", "swish")
            for direction in ("fwd", "bwd")
        },
    },
    "fla.modules.fused_cross_entropy.ops": {
        **_cpu("cross_entropy_loss", registry=OWN),
        # Before it comes to that, it insists on a GPU or NPU.
        **_cpu("FusedCrossEntropyLoss.forward"),
    },
    "fla.modules.fused_linear_cross_entropy.ops": _cpu("fused_linear_cross_entropy_loss"),
    "fla.modules.fused_kl_div.ops": _cpu("fused_kl_div_loss"),
    "fla.modules.token_shift": _cpu("token_shift"),
}
"""FLA's module -> its function -> how it is served."""


def _forward(activation: Callable[..., torch.Tensor], x: torch.Tensor, **settings: Any) -> torch.Tensor:
    return activation(x, **settings)


def _backward(
    activation: Callable[..., torch.Tensor], x: torch.Tensor, dy: torch.Tensor, **settings: Any
) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(activation(x, **settings), x, dy)[0]


sigmoid_fwd, sigmoid_bwd = (partial(run, activations.sigmoid) for run in (_forward, _backward))
logsigmoid_fwd, logsigmoid_bwd = (partial(run, activations.logsigmoid) for run in (_forward, _backward))
swish_fwd, swish_bwd = (partial(run, activations.swish) for run in (_forward, _backward))


@dataclass(eq=False)
class FlaHook:
    """What is registered with FLA and replaced in it, to be extended and undone."""

    report: Report
    _registries: list[tuple[dict[str, Any], set[str]]] = field(default_factory=list)
    """Backends of FLA's registries, and what those have logged."""
    _replaced: list[tuple[Any, Any]] = field(default_factory=list)
    """`(original, replacement)`."""
    _methods: list[tuple[type, str, Any]] = field(default_factory=list)
    """`(class, name, original)`."""
    _attached: dict[str, ModuleSpec | None] = field(default_factory=dict)
    """Module -> its spec, which is another one when it is loaded again."""

    def extend(self) -> None:
        """`attach` to every module of FLA that is imported."""
        for name in TARGETS:
            if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
                importlib.import_module(name)
        with lock:
            new = [self._serve(sys.modules[name]) for name in TARGETS if name in sys.modules]
            _exchange([pair for pairs in new for pair in pairs], sys.modules)

    def attach(self, module: ModuleType) -> None:
        """Serve what a module of FLA defines that was just imported."""
        with lock:
            _exchange(self._serve(module), [name for name in sys.modules if name.startswith("fla.")])

    def _serve(self, module: ModuleType) -> list[tuple[Any, Any]]:
        """Register with FLA; returns what is to be replaced, and by what."""
        name = module.__name__
        backends = sys.modules.get("fla.backends")
        known = name in self._attached and self._attached[name] is module.__spec__
        if known or not name.startswith("fla.") or backends is None:
            return []
        self._attached[name] = module.__spec__
        new = []
        for function, target in TARGETS[name].items():
            class_name, _, method = function.rpartition(".")
            owner = vars(module).get(class_name) if class_name else module
            original = getattr(owner, method, None)
            if original is None:
                self.report.skipped[f"{name}.{function}"] = "this FLA has no such function"
                continue
            path = name.replace("fla", BACKEND, 1).removesuffix(".ops")
            implementation = load(target.function or f"{path}:{function}")
            if target.registry is not None:
                try:
                    self._register(backends, original, function, implementation, target)
                except (AttributeError, KeyError, TypeError) as error:
                    # Private parts of FLA, which a later version may have changed.
                    reason = f"this FLA registers backends in another way: {error!r}"
                    self.report.skipped[f"{name}.{function}"] = reason
            else:
                served = _served(function, original, implementation, target, self.report)
                if isinstance(owner, type):
                    self._methods.append((owner, method, original))
                    setattr(owner, method, served)
                else:
                    new.append((original, served))
                self.report.patched.append(f"{name}.{function}")
        self._replaced += new
        return new

    def undo(self) -> None:
        """Take the backends out of FLA's registries and put the original functions back."""
        with lock:
            for backends, logged in self._registries:
                backends.pop(BACKEND, None)
                logged -= {entry for entry in logged if f":{BACKEND}" in entry}
            _exchange([(replacement, original) for original, replacement in self._replaced], sys.modules)
            for owner, method, original in self._methods:
                setattr(owner, method, original)
            self._registries.clear()
            self._replaced.clear()
            self._methods.clear()
            self._attached.clear()

    def _register(
        self, backends: ModuleType, original: Any, function: str, implementation: Callable[..., Any], target: _Target
    ) -> None:
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

        def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            return _accepts(target, args, kwargs), f"fla_npu serves it on {' and '.join(target.devices)}"

        @functools.wraps(implementation)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.report.count(function)
            return implementation(*args, **kwargs)

        setattr(backend, f"{function}_verifier", verify)
        setattr(backend, function, run)
        self.report.patched.append(f"{original.__module__}.{function}")


def _served(
    function: str,
    original: Callable[..., Any],
    implementation: Callable[..., Any],
    target: _Target,
    report: Report,
) -> Callable[..., Any]:
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
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    if first is None:
        return False  # FLA says what is missing
    options = {**vars(args[0]), **kwargs} if args and isinstance(args[0], torch.nn.Module) else kwargs
    return first.device.type in target.devices and all(options.get(name) is None for name in REFUSED)


def _exchange(pairs: list[tuple[Any, Any]], modules: Iterable[str]) -> None:
    """The second of a pair for the first in modules, which import functions from FLA and from each other by name."""
    replacements = {id(old): new for old, new in pairs}
    for module in [sys.modules.get(name) for name in list(modules)] if pairs else ():
        if isinstance(module, ModuleType):
            for key in [key for key, value in list(vars(module).items()) if id(value) in replacements]:
                setattr(module, key, replacements[id(vars(module)[key])])
