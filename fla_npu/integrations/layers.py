"""Whole linear-attention layers of transformers on this package: `fla_npu.enable(layers=True)`.

Replacing ops leaves what surrounds them to transformers: the concatenation of q, k and v and of the convolution's
context, gates and gated norm, each a pass over `[B, T, ...]` or several. A replaced layer is a subclass of
transformers' own, so its parameters, and with them checkpoints, are the same. It convolves q, k and v where the
projections left them, hands the gates' logits to the op and normalises with this package's gated norm, so that on a
CPU everything between two projections happens block by block in the cache, and on an NPU in kernels.

Models that `from_pretrained` and `from_config` build get the subclasses through transformers' patch mapping; layers
that exist change their class. Undoing it changes the class back.

A layer is replaced when its `forward` uses nothing that is not understood here (`RECIPES`), and runs as transformers
wrote it, with the ops alone replaced, when a call needs something else: `torch.compile` and `torch.export`, other
devices, a cache that records the past (speculative decoding), weights that are offloaded.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from fla_npu.integrations.instances import instances
from fla_npu.integrations.report import Report, lock
from fla_npu.integrations.transformers import MODELING, OPS, SERVED_DEVICES, Hook
from fla_npu.modules.causal_conv1d.ops import ACTIVATIONS, causal_conv1d, causal_conv1d_update
from fla_npu.modules.norm.fused_norm_gate import rms_norm_gated
from fla_npu.modules.norm.rms import GATES
from fla_npu.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla_npu.ops.kda import chunk_kda, fused_recurrent_kda


class Projected(NamedTuple):
    """What the projections of a layer make of its input."""

    mixed: tuple[torch.Tensor, ...]
    """`[B, T, C_i]`: together the channels of the convolution, in its order."""
    decay: torch.Tensor
    """Logits `[B, T, HV]` or `[B, T, HV * K]`."""
    beta: torch.Tensor
    """Logits `[B, T, HV]`."""
    gate: Callable[[], torch.Tensor]
    """Of the norm, `[B, T, HV * V]` in any shape; asked for after the op, which then has more room."""


class Heads(NamedTuple):
    """Sizes of a layer's heads, and the widths of q, k and v side by side."""

    key: int
    value: int
    widths: tuple[int, int, int]


@dataclass(frozen=True)
class Recipe:
    """How the layers of one make are read."""

    uses: frozenset[str]
    """What its `forward` names beyond `COMMON`."""
    chunk: Callable[..., Any]
    recurrent: Callable[..., Any]
    norm: str
    output: str
    project: Callable[[Any, torch.Tensor], Projected]
    heads: Callable[[Any], Heads]
    options: Callable[[Any], dict[str, Any] | None]
    """Parameters of the op's gates; None when the gate is not understood."""
    constants: frozenset[float] = frozenset()
    """Numbers in its `forward`."""


COMMON = frozenset(
    # tensors
    ("F", "cat", "exp", "float", "float32", "pop", "repeat_interleave", "reshape", "shape", "sigmoid", "softplus"),
).union(
    ("split", "squeeze", "to", "torch", "transpose", "view"),
    # convolution
    ("activation", "bias", "causal_conv1d_fn", "causal_conv1d_update", "conv1d", "conv_kernel_size", "weight"),
    # cache and mask
    ("apply_mask_to_padding_states", "get_conv_state", "get_recurrent_state", "is_recording_past", "layer_idx"),
    ("update_conv_state", "update_recurrent_state"),
)
"""Names in the `forward` of any layer that is understood."""

NORM_NAMES = frozenset(
    ("ACT2FN", "activation", "dtype", "float32", "mean", "pow", "rsqrt", "to", "torch", "variance_epsilon", "weight")
)
"""Names in the `forward` of a gated norm that is understood."""

GATE_NAMES = frozenset(
    ("A_log", "F", "dt_bias", "dtype", "exp", "f_a_proj", "f_b_proj", "f_proj", "float", "head_dim", "log"),
).union(
    ("lower_bound", "num_heads", "safe_gate", "safe_gate_lower_bound", "shape", "sigmoid", "softplus", "to", "torch"),
    ("view", "where"),
)
"""The same for KDA's forget gate."""

SOFTPLUS_CONSTANTS = frozenset((1.0, 20.0))


def _gdn_heads(layer: Any) -> Heads:
    return Heads(layer.head_k_dim, layer.head_v_dim, (layer.key_dim, layer.key_dim, layer.value_dim))


def _gdn_options(layer: Any) -> dict[str, Any]:
    return {
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "allow_neg_eigval": getattr(layer, "allow_neg_eigval", False),
    }


def _project_qwen3_next(layer: Any, x: torch.Tensor) -> Projected:
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return Projected((q.flatten(2), k.flatten(2), v.flatten(2)), a, b, lambda: z)


def _project_qwen3_5(layer: Any, x: torch.Tensor) -> Projected:
    return Projected((layer.in_proj_qkv(x),), layer.in_proj_a(x), layer.in_proj_b(x), lambda: layer.in_proj_z(x))


def _project_olmo(layer: Any, x: torch.Tensor) -> Projected:
    mixed = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    return Projected(mixed, layer.a_proj(x), layer.b_proj(x), lambda: layer.g_proj(x))


def _kda_heads(layer: Any) -> Heads:
    return Heads(layer.head_dim, layer.head_dim, (layer.qkv_dim,) * 3)


def _kda_options(layer: Any) -> dict[str, Any] | None:
    gate = layer.forget_gate
    if not _gate_is_understood(gate.__class__):
        return None
    if hasattr(gate, "safe_gate"):
        lower_bound = gate.lower_bound if gate.safe_gate else None
    else:
        lower_bound = getattr(gate, "safe_gate_lower_bound", None)
    return {"A_log": gate.A_log.flatten(), "dt_bias": gate.dt_bias, "lower_bound": lower_bound}


def _project_kda(layer: Any, x: torch.Tensor) -> Projected:
    gate = layer.forget_gate
    decay = gate.f_proj(x) if hasattr(gate, "f_proj") else gate.f_b_proj(gate.f_a_proj(x))

    def output_gate() -> torch.Tensor:
        return layer.g_proj(x) if hasattr(layer, "g_proj") else layer.g_b_proj(layer.g_a_proj(x))

    return Projected((layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)), decay, layer.b_proj(x), output_gate)


def _gdn(uses: tuple[str, ...], project: Callable[[Any, torch.Tensor], Projected], **rest: Any) -> Recipe:
    """`uses` ends with the norm and the last projection."""
    own = ("A_log", "dt_bias", "head_k_dim", "head_v_dim", "key_dim", "num_k_heads", "num_v_heads", "value_dim")
    return Recipe(
        uses=frozenset((*uses, *own, "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")),
        chunk=chunk_gated_delta_rule,
        recurrent=fused_recurrent_gated_delta_rule,
        norm=uses[-2],
        output=uses[-1],
        project=project,
        heads=_gdn_heads,
        options=_gdn_options,
        **rest,
    )


RECIPES = (
    _gdn(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"), _project_qwen3_5),
    _gdn(
        ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering", "norm", "out_proj"),
        _project_qwen3_next,
    ),
    _gdn(
        ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "allow_neg_eigval", "o_norm", "o_proj"),
        _project_olmo,
        constants=frozenset((2.0,)),
    ),
    Recipe(
        uses=frozenset(
            ("q_proj", "k_proj", "v_proj", "b_proj", "g_proj", "g_a_proj", "g_b_proj", "forget_gate", "o_norm"),
        ).union(("o_proj", "head_dim", "qkv_dim", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")),
        chunk=chunk_kda,
        recurrent=fused_recurrent_kda,
        norm="o_norm",
        output="o_proj",
        project=_project_kda,
        heads=_kda_heads,
        options=_kda_options,
    ),
)
"""The makes of layers: Qwen3.5 and its kin, Qwen3-Next, OLMo-hybrid, and KDA as in Kimi-Linear, Ling and GLM."""


@dataclass(eq=False)
class LayerHook:
    """The layers replaced in modeling modules. Their ops are those of `served`, and so are they where those are not."""

    served: Hook
    report: Report
    _classes: dict[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    """Original -> replacement."""
    _attached: dict[ModuleType, ModuleSpec | None] = field(default_factory=dict)
    """Module -> its spec, which is another one when it is loaded again."""

    def extend(self) -> None:
        """`attach` to every imported modeling module whose ops are served."""
        with lock:
            for module in [m for name, m in list(sys.modules.items()) if MODELING.fullmatch(name)]:
                self.attach(module)
            _exchange(self._classes)

    def attach(self, module: ModuleType) -> None:
        """Replace the layers that a modeling module defines, once its ops are served."""
        with lock:
            served = {p.name: p.replacement for p in self.served.patches if p.module is module and p.name in OPS}
            if not served or (module in self._attached and self._attached[module] is module.__spec__):
                return
            # Reloading a module has given it other classes.
            self._put_back([c for c in self._classes if c.__module__ == module.__name__])
            self._attached[module] = module.__spec__
            if not _has_cache_states():
                self.report.skipped[f"{module.__name__}: layers"] = "whole layers need transformers 5.22 or later"
                return
            replacements = {}
            for original in _modules_of(module):
                if original.__name__.endswith("RMSNormGated") and NORM_NAMES.issuperset(_names(original)):
                    replacements[original] = _subclass(original, _norm_forward(original, self, served))
                elif served.keys() & set(_names(original)):
                    recipe = _recipe(original)
                    if recipe is None:
                        name = f"{module.__name__}.{original.__name__}"
                        self.report.skipped[name] = "its forward does what is not known here; its ops are served"
                    else:
                        replacements[original] = _subclass(original, _layer_forward(original, recipe, self, served))
            self._register(module, replacements)

    def undo(self) -> None:
        """Put the original classes back, in the patch mapping, in modules and in layers."""
        with lock:
            self._put_back(list(self._classes))
            self._attached.clear()

    def _put_back(self, classes: list[type[nn.Module]]) -> None:
        originals = {self._classes.pop(original): original for original in classes}
        if not originals:
            return
        mapping = _patching().get_patch_mapping()
        _patching().unregister_patch_mapping([name for name, c in mapping.items() if c in originals])
        for module in self._attached:
            # transformers leaves them there when the constructor of a model raises.
            for name in [name for name, value in list(vars(module).items()) if _is_class(value, originals)]:
                setattr(module, name, originals[vars(module)[name]])
        _exchange(originals)
        for original in classes:
            _current.pop(original, None)

    def _register(self, module: ModuleType, replacements: Mapping[type[nn.Module], type[nn.Module]]) -> None:
        for original, replacement in replacements.items():
            name = f"{module.__name__}.{original.__name__}"
            try:
                _patching().register_patch_mapping({original.__name__: replacement})
            except ValueError:
                self.report.skipped[name] = "transformers' patch mapping has another replacement; its ops are served"
                continue
            self._classes[original] = _current[original] = replacement
            self.report.patched.append(name)


_current: dict[type[nn.Module], type[nn.Module]] = {}
"""Original -> replacement in place; for layers that are unpickled."""


def _subclass(original: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    body = {"forward": forward, "__reduce_ex__": _reduce, "__module__": __name__}
    return type(f"Fused{original.__name__}", (original,), body)


def _layer_forward(
    original: type[nn.Module], recipe: Recipe, hook: LayerHook, served: Mapping[str, Any]
) -> Callable[..., torch.Tensor]:
    def runs(layer: Any, x: torch.Tensor, cache: Any, mask: Any, bounds: Any, kwargs: Mapping[str, Any]) -> bool:
        return (
            x.device.type in SERVED_DEVICES
            and not torch.compiler.is_compiling()
            and layer.conv1d.weight.device == x.device
            and layer.activation in ACTIVATIONS
            and (cache is None or not cache.is_recording_past(layer.layer_idx))
            # What precedes a packed sequence in a cache is not known by its bounds, nor where the rows of a batch end.
            and (bounds is None if cache is not None else bounds is not None or kwargs.get("seq_idx") is None)
            and (mask is None or mask.ndim == 2)
        )

    @functools.wraps(original.forward)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or not _in_place(original, served):
            return original.forward(self, hidden_states, *args, **kwargs)
        cache = kwargs.get("cache", kwargs.get("cache_params"))
        mask, bounds = kwargs.get("attention_mask"), kwargs.get("cu_seq_lens_q")
        options = recipe.options(self) if runs(self, hidden_states, cache, mask, bounds, kwargs) else None
        if options is None:
            hook.report.count_delegated(original.__name__)
            return original.forward(self, hidden_states, **kwargs)
        hook.report.count(original.__name__)
        if mask is not None:
            hidden_states = (hidden_states * mask[:, :, None]).to(hidden_states.dtype)
        return _forward(self, recipe, options, hidden_states, cache, bounds, hook.report)

    return forward


def _forward(
    layer: Any,
    recipe: Recipe,
    options: Mapping[str, Any],
    x: torch.Tensor,
    cache: Any,
    bounds: torch.Tensor | None,
    report: Report,
) -> torch.Tensor:
    state = None if cache is None else cache.get_recurrent_state(layer.layer_idx, state_idx=0)
    heads, projected = recipe.heads(layer), recipe.project(layer, x)
    q, k, v = _convolved(layer, projected.mixed, heads.widths, cache, bounds)
    op = recipe.chunk if state is None or x.shape[1] > 1 else recipe.recurrent
    report.count(op.__name__)
    o, state = op(
        q.unflatten(-1, (-1, heads.key)),
        k.unflatten(-1, (-1, heads.key)),
        v.unflatten(-1, (-1, heads.value)),
        g=projected.decay if recipe.heads is _gdn_heads else projected.decay.unflatten(-1, (-1, heads.key)),
        beta=projected.beta,
        initial_state=state,
        output_final_state=cache is not None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        cu_seqlens=bounds,
        **options,
    )
    del q, k, v
    if cache is not None:
        cache.update_recurrent_state(state, layer.layer_idx)
    o = getattr(layer, recipe.norm)(o, projected.gate().reshape(o.shape))
    return getattr(layer, recipe.output)(o.flatten(2))


def _convolved(
    layer: Any,
    mixed: tuple[torch.Tensor, ...],
    widths: tuple[int, int, int],
    cache: Any,
    bounds: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """q, k and v `[B, T, width]` after the short convolution, whose state in the cache is brought up to date."""
    conv_state = None if cache is None else cache.get_conv_state(layer.layer_idx, state_idx=0)
    weight, bias, size = layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.conv_kernel_size
    if conv_state is not None and mixed[0].shape[1] == 1:
        tokens = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=-1)
        y, _ = causal_conv1d_update(tokens, conv_state, weight=weight, bias=bias, activation=layer.activation)
        return y.split(widths, dim=-1)
    channels = [part.shape[-1] for part in mixed]
    results = [
        causal_conv1d(part, w, b, initial_state=before, activation=layer.activation, cu_seqlens=bounds)[0]
        for part, w, b, before in zip(
            mixed,
            weight.split(channels),
            [None] * len(mixed) if bias is None else bias.split(channels),
            [None] * len(mixed) if conv_state is None else conv_state.split(channels, dim=1),
            strict=True,
        )
    ]
    if cache is not None:
        # The cache joins what it is given to what it has: only the columns that it will keep need to be copied.
        last = torch.cat([part[:, -size:].mT for part in mixed], dim=1)
        cache.update_conv_state(last, layer.layer_idx, conv_kernel_size=size)
    return results[0].split(widths, dim=-1) if len(results) == 1 else tuple(results)


def _norm_forward(original: type[nn.Module], hook: LayerHook, served: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original.forward)
    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if (
            gate is None
            or not _in_place(original, served)
            or hidden_states.device.type not in SERVED_DEVICES
            or torch.compiler.is_compiling()
            or self.activation not in GATES
        ):
            return original.forward(self, hidden_states, gate)
        hook.report.count(original.__name__)
        y = rms_norm_gated(hidden_states, gate, self.weight, None, self.activation, eps=self.variance_epsilon)
        assert isinstance(y, torch.Tensor)
        return y

    return forward


def _in_place(original: type[nn.Module], served: Mapping[str, Any]) -> bool:
    """Whether the ops of a layer's module are still those that were served: neither undone, nor within `torch_path`,
    nor replaced by somebody else."""
    module = vars(sys.modules[original.__module__])
    return all(module.get(name) is replacement for name, replacement in served.items())


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickled as a layer of transformers, which it is again where nothing is enabled."""
    reduced = nn.Module.__reduce_ex__(self, protocol)
    assert isinstance(reduced, tuple)
    return (_rebuild, (type(self).__mro__[1],), *reduced[2:])


def _rebuild(original: type[nn.Module]) -> nn.Module:
    replacement = _current.get(original, original)
    return replacement.__new__(replacement)


def _recipe(original: type[nn.Module]) -> Recipe | None:
    """The recipe that understands everything in the `forward` of a layer."""
    names, numbers = _names(original), _numbers(original)
    fitting = [r for r in RECIPES if (COMMON | r.uses).issuperset(names) and r.constants.issuperset(numbers)]
    return fitting[0] if len(fitting) == 1 else None


@functools.cache
def _gate_is_understood(gate: type[nn.Module]) -> bool:
    return GATE_NAMES.issuperset(_names(gate)) and SOFTPLUS_CONSTANTS.issuperset(_numbers(gate))


def _names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Globals and attributes in the `forward` of a class."""
    return _code(cls).co_names


def _numbers(cls: type[nn.Module]) -> list[float]:
    return [constant for constant in _code(cls).co_consts if isinstance(constant, float)]


def _code(cls: type[nn.Module]) -> CodeType:
    return inspect.unwrap(cls.forward).__code__


def _modules_of(module: ModuleType) -> list[type[nn.Module]]:
    """Classes with a `forward` of their own that a modeling module defines."""
    return [
        c
        for c in vars(module).values()
        if inspect.isclass(c)
        and issubclass(c, nn.Module)
        and c.__module__ == module.__name__
        and hasattr(inspect.unwrap(c.forward), "__code__")
    ]


def _is_class(value: Any, classes: Mapping[type[nn.Module], Any]) -> bool:
    return inspect.isclass(value) and value in classes


def _exchange(classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Change the class of all layers that exist."""
    if classes:
        for layer in instances(classes.__contains__):
            layer.__class__ = classes[type(layer)]


def _has_cache_states() -> bool:
    from transformers.cache_utils import Cache

    return hasattr(Cache, "get_conv_state")


def _patching() -> ModuleType:
    return importlib.import_module("transformers.monkey_patching")
