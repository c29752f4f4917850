"""Tensor parallelism: every device holds and computes some heads of each layer.

Heads are independent of each other between the projections of a layer's input and the sum that is its output. So the
projections of queries, keys, values and gates, the short convolutions, `A_log` and `dt_bias` are cut into ranges of
heads, and the columns of the output projection with them. A layer communicates once forward, the sum of its outputs,
and once backward, the sum of the gradients of its input; states in a cache are those of a device's own heads.

Parameters are DTensors: state dicts, optimizers and gradient clipping see whole tensors. The arithmetic is that of one
device, on the local tensors. torch's `ColwiseParallel` computes on DTensors instead, projection by projection, which
costs an all-reduce for each in backward and a dispatch for each in every decoding step.

Some parameters are several tensors one below the other: the keys' projection of `GatedDeltaProduct` has one with all
heads for each update of the state, and `Mamba2` has one projection for everything. No placement of DTensors says which
rows of such a parameter a device holds, so each of its blocks becomes a parameter of its own. They lie next to each
other in memory: what computes with them reads them as the one tensor that they are. State dicts have the one as well,
by hooks.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fla_npu.dtypes import compute_dtype
from fla_npu.layers import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    Mamba2,
    MultiScaleRetention,
    SimpleGatedLinearAttention,
)
from fla_npu.layers.attn import Attention
from fla_npu.modules import GatedMLP, ShortConvolution
from fla_npu.modules.layernorm_gated import RMSNormGated


class Block(NamedTuple):
    """Rows of a parameter that are cut by themselves, or that all devices hold."""

    rows: int
    is_cut: bool


Blocks = Callable[[Any, int], list[Block]]
"""The blocks, from the first row to the last, of a parameter of a layer with so many rows."""


class Layout(NamedTuple):
    """How a kind of layer is cut.

    `counts` are what every device gets an equal part of; they and `sizes`, multiples of them, are attributes of the
    layer. `axes` has the axis along which parameters are cut, by patterns of their names; None where all devices hold
    the whole, and a function for rows that are cut in blocks. `input` is the argument that all projections but one
    read, `output` that one, whose results are to be summed. `shareable` are counts, too, but a count of one is the same
    on all devices. `adapt` is called with a layer whose parameters and sizes are those of a device, and the mesh.
    """

    counts: tuple[str, ...]
    sizes: tuple[str, ...]
    axes: dict[str, int | Blocks | None]
    input: str = "hidden_states"
    output: str = "o_proj"
    shareable: tuple[str, ...] = ()
    adapt: Callable[[Any, DeviceMesh], None] | None = None

    def cut_counts(self, layer: nn.Module) -> list[str]:
        """The counts that are divided among the devices."""
        return [*self.counts, *(count for count in self.shareable if getattr(layer, count) > 1)]


def _updates(layer: GatedDeltaProduct, rows: int) -> list[Block]:
    """A block for each update of the state."""
    return [Block(rows // layer.num_householder, is_cut=True)] * layer.num_householder


def _convolved(layer: Mamba2, rows: int) -> list[Block]:
    """x by heads, then B and C by groups, or the same on all devices where all heads share one group."""
    states = layer.n_groups * layer.ssm_state_size
    shared = [Block(states, is_cut=True)] * 2 if layer.n_groups > 1 else [Block(2 * states, is_cut=False)]
    return [Block(layer.intermediate_size, is_cut=True), *shared]


def _projected(layer: Mamba2, rows: int) -> list[Block]:
    """z, what is convolved, and the time steps."""
    z, time_steps = Block(layer.intermediate_size, is_cut=True), Block(layer.num_heads, is_cut=True)
    return [z, *_convolved(layer, rows), time_steps]


def _adapt_mamba2(layer: Mamba2, mesh: DeviceMesh) -> None:
    # A group of channels of which every device has a part.
    if layer.norm is not None and (layer.norm.group_size or 0) > layer.intermediate_size:
        _norm_over_devices(layer.norm, mesh)


def _norm_over_devices(norm: RMSNormGated, mesh: DeviceMesh) -> None:
    """The mean of a norm becomes that of the channels on all devices."""

    def forward(self: RMSNormGated, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        y = x.to(compute_dtype(x))
        gate = 1.0 if z is None else F.silu(z.to(y.dtype))
        y = y if self.norm_before_gate else y * gate
        squares = _Sum.apply(y.square().sum(-1, keepdim=True), mesh)
        mean = _UsedInParts.apply(squares, mesh) / (y.shape[-1] * mesh.size())
        y = y * torch.rsqrt(mean + self.eps) * self.weight.to(y.dtype)
        return (y * gate if self.norm_before_gate else y).to(x.dtype)

    norm.forward = MethodType(forward, norm)  # type: ignore[method-assign]


def _number_heads(layer: MultiScaleRetention, mesh: DeviceMesh) -> None:
    layer.first_head = mesh.get_local_rank() * layer.num_heads


HEAD_AXES: dict[str, int | Blocks | None] = {
    "[qkvb]_proj.weight": 0,
    "[qkv]_conv1d.*": 0,
    "A_log": 0,
    "dt_bias": 0,
    "o_norm.weight": None,
    "g_norm*.weight": None,
    "o_proj.weight": 1,
}

GROUPED_SIZES = ("key_dim", "value_dim", "key_dim_per_group", "value_dim_per_group")

LAYOUTS: dict[type[nn.Module], Layout] = {
    GatedDeltaNet: Layout(
        counts=("num_heads", "num_v_heads"),
        sizes=("key_dim", "value_dim"),
        axes={"[ag]_proj.weight": 0, **HEAD_AXES},
    ),
    KimiDeltaAttention: Layout(
        counts=("num_heads", "num_v_heads"),
        sizes=("key_dim", "value_dim", "gate_dim"),
        axes={"[fg]_proj.0.weight": None, "[fg]_proj.1.*": 0, **HEAD_AXES},
    ),
    GatedDeltaNet2: Layout(
        counts=("num_heads", "num_v_heads"),
        sizes=("key_dim", "value_dim"),
        axes={"w_proj.weight": 0, "[fg]_proj.0.weight": None, "[fg]_proj.1.*": 0, **HEAD_AXES},
    ),
    GatedDeltaProduct: Layout(
        counts=("num_heads", "num_v_heads"),
        sizes=("key_dim", "value_dim"),
        axes={"[kvb]_proj.weight": _updates, "[kv]_conv1d.*": _updates, "[ag]_proj.weight": 0, **HEAD_AXES},
    ),
    DeltaNet: Layout(
        counts=("num_heads",),
        sizes=("key_dim", "value_dim"),
        axes={"g_proj.weight": 0, **HEAD_AXES},
    ),
    GatedLinearAttention: Layout(
        counts=("num_heads", "num_kv_heads"),
        sizes=GROUPED_SIZES,
        axes={"g_proj.weight": 0, "gk_proj.0.weight": None, "gk_proj.1.*": 0, **HEAD_AXES},
    ),
    SimpleGatedLinearAttention: Layout(
        counts=("num_heads", "num_kv_heads"),
        sizes=GROUPED_SIZES,
        axes={"g_proj.weight": 0, "gk_proj.*": 0, **HEAD_AXES},
    ),
    MultiScaleRetention: Layout(
        counts=("num_heads", "num_kv_heads"),
        sizes=GROUPED_SIZES,
        axes={"g_proj.weight": 0, **HEAD_AXES},
        adapt=_number_heads,
    ),
    Mamba2: Layout(
        counts=("num_heads",),
        shareable=("n_groups",),
        sizes=("intermediate_size",),
        axes={
            "in_proj.*": _projected,
            "conv1d.*": _convolved,
            "norm.weight": 0,
            "A_log": 0,
            "D": 0,
            "dt_bias": 0,
            "out_proj.weight": 1,
            "out_proj.bias": None,
        },
        output="out_proj",
        adapt=_adapt_mamba2,
    ),
    Attention: Layout(
        counts=("num_heads", "num_kv_heads"),
        sizes=("kv_dim",),
        axes={"[qkv]_proj.*": 0, "[qk]_norm.weight": None, "o_proj.weight": 1},
    ),
    GatedMLP: Layout(
        counts=("intermediate_size",),
        sizes=(),
        axes={"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1},
        input="x",
        output="down_proj",
    ),
}


def blocks_of(layer: nn.Module) -> dict[str, list[Block]]:
    """The blocks of those parameters of a layer, by name, that have more than one."""
    found = {}
    if type(layer) in LAYOUTS:
        for name, parameter in layer.named_parameters():
            axis = _axis(LAYOUTS[type(layer)], name)
            if callable(axis) and len(blocks := axis(layer, parameter.shape[0])) > 1:
                found[name] = blocks
    return found


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut the layers of a model into ranges of heads, one for each device of a mesh. Changes `module` in place.

    Every process calls it with a module of the same sizes; the parameters become those of the mesh's first process.
    Afterwards the processes call the module with the same inputs, and get the same outputs and gradients. Parameters
    are DTensors then, cut or the same everywhere, and local tensors while the module runs.

    Args:
        module: a layer that `LAYOUTS` has, such as `GatedDeltaNet` or `KimiDeltaAttention`, or a module that contains
            some. Everything else in it, such as norms, embeddings and the head, is computed by all.
        mesh: one-dimensional, of any backend: `init_device_mesh("npu", (8,))`, or `mesh["tp"]` of a larger one.

    Returns:
        `module`.

    Raises:
        ValueError: heads that cannot be shared out equally; a mesh of more dimensions; nothing to cut; a module that is
            parallel already.
    """
    layers = {name: layer for name, layer in module.named_modules() if type(layer) in LAYOUTS}
    if not layers:
        names = ", ".join(sorted(kind.__name__ for kind in LAYOUTS))
        raise ValueError(f"module must be or contain one of {names}, got {type(module).__name__}")
    for name, layer in layers.items():
        _check(layer, name, mesh)
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for layer in layers.values():
        _cut(layer, mesh)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                # Tied parameters stay one.
                if parameter not in whole:
                    whole[parameter] = _distribute(parameter, mesh, Replicate())
                owner.register_parameter(name, whole[parameter])
    _LocalParameters(module)
    return module


class HeadParallel(ParallelStyle):
    """What `parallelize` does to one layer, as a style for the plans of `torch.distributed.tensor.parallel`.

    `parallelize_module(block, mesh, {"attn": HeadParallel(), "mlp": HeadParallel()})` cuts these two and leaves the
    other parameters of the block as they are. Errors are those of `parallelize`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) not in LAYOUTS:
            names = ", ".join(sorted(kind.__name__ for kind in LAYOUTS))
            raise ValueError(f"HeadParallel can cut {names}, got {type(module).__name__}")
        _check(module, "", device_mesh)
        _cut(module, device_mesh)
        _LocalParameters(module)
        return module


def _check(layer: nn.Module, name: str, mesh: DeviceMesh) -> None:
    label = f"{type(layer).__name__} {name!r}" if name else type(layer).__name__
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as mesh['tp'] of a larger one, got {mesh.ndim}")
    layout = LAYOUTS[type(layer)]
    for parameter_name, parameter in layer.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"module must not be parallel yet, but {parameter_name} of {label} is a DTensor")
        _axis(layout, parameter_name)
    for count in layout.cut_counts(layer):
        if getattr(layer, count) % mesh.size():
            raise ValueError(
                f"{count} must be {'1 or ' if count in layout.shareable else ''}a multiple of the number of devices: "
                f"{label} has {count}={getattr(layer, count)}, mesh has world size {mesh.size()}"
            )


def _axis(layout: Layout, name: str) -> int | Blocks | None:
    for pattern, axis in layout.axes.items():
        if fnmatchcase(name, pattern):
            return axis
    raise ValueError(f"module must have no parameters of others, such as adapters, before it is cut, got {name}")


def _cut(layer: nn.Module, mesh: DeviceMesh) -> None:
    """The layer's parameters and sizes become those of a device, and its input and output communicate."""
    layout = LAYOUTS[type(layer)]
    blocks = blocks_of(layer)
    for prefix, owner in layer.named_modules():
        owner._is_in_cut_layer = True
        for name, parameter in list(owner.named_parameters(recurse=False)):
            full_name = f"{prefix}.{name}" if prefix else name
            if full_name in blocks:
                _cut_in_blocks(owner, name, blocks[full_name], mesh)
            else:
                axis = _axis(layout, full_name)
                placement = Replicate() if axis is None else Shard(0 if callable(axis) else axis)
                owner.register_parameter(name, _distribute(parameter, mesh, placement))
        if isinstance(owner, ShortConvolution):
            owner.hidden_size //= mesh.size()
    for size in (*layout.cut_counts(layer), *layout.sizes):
        setattr(layer, size, getattr(layer, size) // mesh.size())
    if layout.adapt is not None:
        layout.adapt(layer, mesh)

    def share_input(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (_UsedInParts.apply(args[0], mesh), *args[1:]), kwargs
        return args, {**kwargs, layout.input: _UsedInParts.apply(kwargs[layout.input], mesh)}

    def sum_output(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(output, mesh)

    layer.register_forward_pre_hook(share_input, with_kwargs=True)
    output: Any = layer.get_submodule(layout.output)
    output.register_forward_hook(sum_output)
    output._is_summed = True


def _cut_in_blocks(owner: nn.Module, name: str, blocks: list[Block], mesh: DeviceMesh) -> None:
    """A parameter of `owner` becomes one for each of its blocks, with the block's number after its name."""
    parameter = owner.get_parameter(name)
    names = [f"{name}_{i}" for i in range(len(blocks))]
    owner.register_parameter(name, None)
    for block_name, block, rows in zip(
        names, blocks, parameter.data.split([block.rows for block in blocks]), strict=True
    ):
        # Not as a part of a larger tensor, see `_adjoin`.
        cut = distribute_tensor(rows.clone(), mesh, [Shard(0) if block.is_cut else Replicate()])
        owner.register_parameter(block_name, _parameter(cut, parameter))
    if not _blocks(owner):
        owner.register_state_dict_post_hook(_join_in_state_dict)
        owner.register_load_state_dict_pre_hook(_cut_in_state_dict)
        owner.register_load_state_dict_post_hook(_adjoin)
    _blocks(owner)[name] = names
    _adjoin(owner)


def _blocks(owner: nn.Module) -> dict[str, list[str]]:
    """The names of the blocks, by the names of the parameters that a module has in blocks."""
    return owner.__dict__.setdefault("_names_of_blocks", {})


def _adjoin(owner: nn.Module, *_: Any) -> None:
    """The blocks of each parameter move next to each other in memory, so that `_Joined` need not copy them. When they
    are cut, and when they are loaded: they may have been allocated on another device before."""
    for names in _blocks(owner).values():
        blocks: list[Any] = [owner.get_parameter(block) for block in names]
        # Otherwise the memory belongs to FSDP.
        if all(block.device_mesh.ndim == 1 for block in blocks):
            local = torch.cat([block.to_local().detach() for block in blocks])
            for block, rows in zip(blocks, local.split([len(block.to_local()) for block in blocks]), strict=True):
                # A DTensor made of such rows could not be deep-copied: torch takes an offset into the memory of a
                # DTensor's local tensor for memory of its own.
                block._local_tensor = rows


def _distribute(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    return _parameter(distribute_tensor(parameter.data, mesh, [placement]), parameter)


def _parameter(x: DTensor, origin: nn.Parameter) -> nn.Parameter:
    """x as a parameter, with what is known of the one that it comes from."""
    parameter = nn.Parameter(x, origin.requires_grad)
    parameter.__dict__.update(origin.__dict__)
    return parameter


def _join_in_state_dict(owner: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """The blocks of a parameter become the whole, of which every device holds some rows, whatever is in them."""
    for name, names in _blocks(owner).items():
        blocks = [state_dict.pop(prefix + block) for block in names]
        mesh = blocks[0].device_mesh
        whole = torch.cat([block.full_tensor() for block in blocks])
        state_dict[prefix + name] = distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)


def _cut_in_state_dict(owner: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """The inverse of `_join_in_state_dict`, for the whole on every device as well."""
    for name, names in _blocks(owner).items():
        whole = state_dict.get(prefix + name)
        blocks: list[Any] = [owner.get_parameter(block) for block in names]
        if whole is None or whole.shape[0] != sum(len(block) for block in blocks):
            continue  # torch reports that it does not find the blocks
        del state_dict[prefix + name]
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        for block_name, block, rows in zip(names, blocks, whole.split([len(b) for b in blocks]), strict=True):
            cut = distribute_tensor(rows, block.device_mesh, block.placements, src_data_rank=None)
            state_dict[prefix + block_name] = cut


class _Joined(torch.autograd.Function):
    """The tensors one below the other: without a copy where they lie so in memory, as `_adjoin` leaves them."""

    @staticmethod
    def forward(ctx: Any, *blocks: torch.Tensor) -> torch.Tensor:
        ctx.sizes = [len(block) for block in blocks]
        first, end = blocks[0], blocks[0].storage_offset()
        for block in blocks:
            is_next = block.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            if not (is_next and block.is_contiguous() and block.storage_offset() == end):
                return torch.cat(blocks)
            end += block.numel()
        return first.as_strided((sum(ctx.sizes), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient.split(ctx.sizes)


class _Sum(torch.autograd.Function):
    """The sum of the devices' x, on all of them, with their common gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _all_reduced(x, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _UsedInParts(torch.autograd.Function):
    """x, which is the same on all devices. Each has only a part of its gradient: it is the sum of these."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduced(gradient, ctx.mesh), None


class _AddedOnce(torch.autograd.Function):
    """x on the first device, zeros on the others, for a sum of the devices' results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return torch.zeros_like(x) if mesh.get_local_rank() else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None  # that of the sum, which all devices have


def _all_reduced(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.get_group())
    return total


class _LocalParameters:
    """Hooks on the modules of a tree. While one of them runs, the DTensors among the parameters in and below it are
    replaced by their local tensors, so that the arithmetic is that of a single device; some modules read the parameters
    of the modules below them. A module can be run by itself, as when a checkpointed block is recomputed in backward.
    """

    def __init__(self, root: nn.Module) -> None:
        self._outermost: nn.Module | None = None
        self._replaced: list[tuple[dict[str, Any], str, DTensor | None]] = []
        for module in root.modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._outermost is None:
            self._outermost = module
            self._replace()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._outermost is module:
            self._restore()
            self._outermost = None

    # torch.compile would trace these with the forward pass, and leaves some parameters replaced.
    @torch.compiler.disable
    def _replace(self) -> None:
        assert self._outermost is not None
        for owner in self._outermost.modules():
            for name, parameter in owner._parameters.items():
                if isinstance(parameter, DTensor):
                    self._replaced.append((owner._parameters, name, parameter))
                    local = parameter.to_local()
                    if getattr(owner, "_is_in_cut_layer", False) and parameter.placements == (Replicate(),):
                        share = _AddedOnce if getattr(owner, "_is_summed", False) else _UsedInParts
                        local = share.apply(local, parameter.device_mesh)
                    owner._parameters[name] = local
            for name, names in _blocks(owner).items():
                self._replaced.append((owner._parameters, name, None))
                owner._parameters[name] = _Joined.apply(*(owner._parameters[block] for block in names))

    @torch.compiler.disable
    def _restore(self) -> None:
        for parameters, name, parameter in self._replaced:
            parameters[name] = parameter
        self._replaced.clear()
