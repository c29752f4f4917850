"""What two processes check together. Each also runs the whole layer or model by itself, with which it compares."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from fla_npu.distributed import HeadParallel, parallelize
from fla_npu.distributed.tensor_parallel import LAYOUTS
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
from fla_npu.models.utils import Cache
from fla_npu.modules import GatedMLP, RMSNorm
from fla_npu.testing import rms_ratio

HIDDEN = 64

MAKERS: dict[str, Callable[..., nn.Module]] = {
    "gdn": lambda **kw: GatedDeltaNet(HIDDEN, head_dim=16, num_heads=4, expand_v=1, conv_bias=True, layer_idx=0, **kw),
    "gdn_gva": lambda **kw: GatedDeltaNet(HIDDEN, head_dim=16, num_heads=2, num_v_heads=4, layer_idx=0, **kw),
    "gdn_bare": lambda **kw: GatedDeltaNet(
        HIDDEN, head_dim=16, num_heads=2, use_gate=False, use_short_conv=False, layer_idx=0, **kw
    ),
    "kda": lambda **kw: KimiDeltaAttention(HIDDEN, head_dim=16, num_heads=4, conv_bias=True, layer_idx=0, **kw),
    "kda_gva": lambda **kw: KimiDeltaAttention(
        HIDDEN, head_dim=16, num_heads=2, num_v_heads=6, safe_gate=True, lower_bound=-5, layer_idx=0, **kw
    ),
    "gdn2": lambda **kw: GatedDeltaNet2(HIDDEN, head_dim=16, num_heads=2, num_v_heads=4, layer_idx=0, **kw),
    "gdp": lambda **kw: GatedDeltaProduct(
        HIDDEN, head_dim=16, num_heads=2, num_v_heads=4, num_householder=3, conv_bias=True, layer_idx=0, **kw
    ),
    "gdp_bare": lambda **kw: GatedDeltaProduct(
        HIDDEN,
        head_dim=16,
        num_heads=2,
        use_forget_gate=False,
        use_output_gate=False,
        use_short_conv=False,
        layer_idx=0,
        **kw,
    ),
    "delta_net": lambda **kw: DeltaNet(
        hidden_size=HIDDEN, num_heads=4, use_gate=True, conv_bias=True, layer_idx=0, **kw
    ),
    "delta_net_bare": lambda **kw: DeltaNet(
        hidden_size=HIDDEN,
        num_heads=2,
        use_beta=False,
        use_short_conv=False,
        qk_activation="elu",
        qk_norm="sum",
        layer_idx=0,
        **kw,
    ),
    "gla": lambda **kw: GatedLinearAttention(
        hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, clamp_min=-3.0, layer_idx=0, **kw
    ),
    "gla_bare": lambda **kw: GatedLinearAttention(
        hidden_size=HIDDEN,
        num_heads=2,
        use_output_gate=False,
        elementwise_affine=False,
        use_short_conv=True,
        feature_map="relu",
        layer_idx=0,
        **kw,
    ),
    "simple_gla": lambda **kw: SimpleGatedLinearAttention(
        hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, gate_fn="sigmoid", conv_bias=True, layer_idx=0, **kw
    ),
    "retention": lambda **kw: MultiScaleRetention(hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, layer_idx=0, **kw),
    "mamba2": lambda **kw: Mamba2(hidden_size=HIDDEN, head_dim=16, state_size=8, use_bias=True, layer_idx=0, **kw),
    "mamba2_groups": lambda **kw: Mamba2(
        hidden_size=HIDDEN,
        head_dim=16,
        state_size=8,
        n_groups=2,
        D_has_hdim=True,
        norm_before_gate=True,
        layer_idx=0,
        **kw,
    ),
    "mamba2_bare": lambda **kw: Mamba2(
        hidden_size=HIDDEN, head_dim=16, state_size=8, rmsnorm=False, use_conv_bias=False, layer_idx=0, **kw
    ),
    "gdp_one": lambda **kw: GatedDeltaProduct(HIDDEN, head_dim=16, num_heads=2, num_householder=1, layer_idx=0, **kw),
}


def bound(dtype: torch.dtype, terms: int = 128) -> float:
    """Two devices add the same terms in another order, at most `terms` of them: the RMS ratio of the results.

    A sum of n terms is wrong by at most n eps times the sum of their magnitudes, which for terms of random signs is
    sqrt(n) times the sum itself. Backward has another such sum, whose error comes on top.
    """
    return 2 * terms**1.5 * torch.finfo(dtype).eps


def close(x: torch.Tensor, reference: torch.Tensor, what: str, limit: float | None = None) -> None:
    error = rms_ratio(whole(x).detach(), reference.detach())
    limit = bound(reference.dtype) if limit is None else limit
    assert error <= limit, f"{what}: {error:.2e}, at most {limit:.2e} expected"


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def rounded_gates(name: str) -> float | None:
    """A limit for the layers whose gates are float32 whatever their parameters are. They may differ in the last bit."""
    return bound(torch.float32) if name in ("gdp", "gdp_one") else None


def pair(name: str, mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """A layer and the same one in parallel."""
    torch.manual_seed(0)
    one = MAKERS[name]().to(dtype)
    return one, parallelize(copy.deepcopy(one), mesh)


def blocks(two: nn.Module, name: str) -> list[Any]:
    """The parameters of a parallel module that one process has as `name`."""
    parallel = dict(two.named_parameters())
    found = [p for block, p in parallel.items() if block == name or block.rpartition("_")[0] == name]
    assert found, name
    return found


def same_parameters(one: nn.Module, two: nn.Module) -> None:
    for name, x in one.named_parameters():
        close(torch.cat([whole(block.detach()) for block in blocks(two, name)]), x, name)


def same_gradients(one: nn.Module, two: nn.Module, limit: float | None = None) -> None:
    for name, parameter in one.named_parameters():
        found = blocks(two, name)
        gradients = [block.grad for block in found]
        assert parameter.grad is not None, name
        for gradient, block in zip(gradients, found, strict=True):
            assert isinstance(gradient, DTensor) and gradient.placements == block.placements, name
        close(torch.cat([whole(x) for x in gradients]), parameter.grad, f"gradient of {name}", limit)


def forward_and_backward(
    one: nn.Module, two: nn.Module, x: torch.Tensor, limit: float | None = None, **options: Any
) -> None:
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [m(v, **options)[0] for m, v in zip((one, two), inputs, strict=True)]
    close(outputs[1], outputs[0], "output", limit)
    weight = torch.randn_like(outputs[0])
    for y in outputs:
        (y * weight).sum().backward()
    assert inputs[0].grad is not None and inputs[1].grad is not None
    close(inputs[1].grad, inputs[0].grad, "gradient of the input", limit)
    same_gradients(one, two, limit)


def _layers_equal(names: tuple[str, ...], mesh: DeviceMesh) -> None:
    for name in names:
        one, two = pair(name, mesh)
        forward_and_backward(one, two, torch.randn(2, 70, HIDDEN, dtype=torch.float64), rounded_gates(name))
        half, output = (layer.get_submodule(LAYOUTS[type(one)].output).weight for layer in (two, one))
        assert half.to_local().shape[1] * mesh.size() == output.shape[1]
        assert two.num_heads * mesh.size() == one.num_heads


def gated_delta_net(mesh: DeviceMesh, folder: Path) -> None:
    _layers_equal(("gdn", "gdn_gva", "gdn_bare", "gdn2"), mesh)


def kimi_delta_attention(mesh: DeviceMesh, folder: Path) -> None:
    _layers_equal(("kda", "kda_gva"), mesh)


def gated_delta_product(mesh: DeviceMesh, folder: Path) -> None:
    _layers_equal(("gdp", "gdp_bare", "gdp_one"), mesh)


def delta_net(mesh: DeviceMesh, folder: Path) -> None:
    _layers_equal(("delta_net", "delta_net_bare"), mesh)


def gated_linear_attention(mesh: DeviceMesh, folder: Path) -> None:
    _layers_equal(("gla", "gla_bare", "simple_gla"), mesh)


def retention(mesh: DeviceMesh, folder: Path) -> None:
    """Each head decays at a rate of its own, which its number gives, in all modes."""
    _layers_equal(("retention",), mesh)
    with torch.no_grad():
        x = torch.randn(2, 70, HIDDEN, dtype=torch.float64)
        for mode in MultiScaleRetention.modes:
            one, two = pair("retention", mesh)
            one.mode = two.mode = mode
            close(two(x)[0], one(x)[0], mode)


def mamba2(mesh: DeviceMesh, folder: Path) -> None:
    """Heads that share one group of B and C, whose norm is over all channels, and groups that are cut as heads are."""
    _layers_equal(("mamba2", "mamba2_groups", "mamba2_bare"), mesh)
    with torch.no_grad():
        for name in ("mamba2", "mamba2_groups"):
            one, two = (m.eval() for m in pair(name, mesh))
            x = torch.randn(2, 12, HIDDEN, dtype=torch.float64)
            caches = Cache(), Cache()
            for start, end in pairwise([0, 9, 10, 11, 12]):
                a, b = (
                    m(x[:, start:end], past_key_values=c, use_cache=True)[0]
                    for m, c in zip((one, two), caches, strict=True)
                )
                close(b, a, f"tokens {start} to {end}")
            all_heads, ours = (c[0]["recurrent_state"] for c in caches)
            close(ours, all_heads.chunk(mesh.size(), dim=1)[mesh.get_local_rank()], "recurrent state")


def read_in_place(two: nn.Module) -> bool:
    """Whether what a projection reads is the memory of its blocks, not a copy."""
    read = []
    with two.k_proj.register_forward_pre_hook(lambda module, _: read.append(module.weight)):
        two(torch.randn(1, 4, HIDDEN, dtype=torch.float64))
    (weight,) = read
    parts = [block.to_local() for block in blocks(two, "k_proj.weight")]
    assert two.k_proj.weight is None and weight.shape == torch.cat(parts).shape
    return weight.data_ptr() == parts[0].data_ptr()


def blocks_are_read_in_place(mesh: DeviceMesh, folder: Path) -> None:
    two = pair("gdp", mesh)[1]
    assert read_in_place(two)
    moved = copy.deepcopy(two).to_empty(device="cpu")
    assert not read_in_place(moved)
    moved.load_state_dict(two.state_dict())
    assert read_in_place(moved)


def packed_and_padded(mesh: DeviceMesh, folder: Path) -> None:
    for name in ("gdn_gva", "kda", "gdp_bare"):
        one, two = pair(name, mesh)
        x = torch.randn(1, 90, HIDDEN, dtype=torch.float64)
        forward_and_backward(one, two, x, cu_seqlens=torch.tensor([0, 3, 67, 67, 90]))
        mask = torch.ones(3, 30, dtype=torch.long)
        mask[0, :7] = mask[2, 25:] = 0
        forward_and_backward(*pair(name, mesh), x.view(3, 30, HIDDEN), attention_mask=mask)


@torch.no_grad()
def cached_decoding(mesh: DeviceMesh, folder: Path) -> None:
    for name in ("gdn", "gdn_gva", "kda_gva", "gdn2", "gdp", "delta_net", "gla", "simple_gla", "retention"):
        limit = rounded_gates(name)
        one, two = (m.eval() for m in pair(name, mesh))
        x = torch.randn(2, 80, HIDDEN, dtype=torch.float64)
        caches = Cache(), Cache()
        cuts = [0, 70, 75, *range(76, 81)]
        for start, end in pairwise(cuts):
            a, b = (
                m(hidden_states=x[:, start:end], past_key_values=c, use_cache=True)[0]
                for m, c in zip((one, two), caches, strict=True)
            )
            close(b, a, f"tokens {start} to {end}", limit)
        all_heads, ours = (c[0]["recurrent_state"] for c in caches)
        close(ours, all_heads.chunk(mesh.size(), dim=1)[mesh.get_local_rank()], "recurrent state", limit)
        updates = 1, *[getattr(one, "num_householder", 1)] * 2
        # GLA has no convolutions by default.
        for n, a, b in zip(updates, *(c[0]["conv_state"] or () for c in caches), strict=two.use_short_conv):
            half = a.unflatten(1, (n, -1)).chunk(mesh.size(), dim=2)[mesh.get_local_rank()].flatten(1, 2)
            close(b, half, "state of a convolution")
        decoded = two(x[:, :1])[0]
        close(decoded, one(x[:, :1])[0], "a token without a cache", limit)


def half_precision(mesh: DeviceMesh, folder: Path) -> None:
    """The output is rounded in each of the two parts and in their sum, where one device rounds once."""
    x = torch.randn(2, 70, HIDDEN)
    for name in ("gdn_gva", "kda"):
        exact = pair(name, mesh)[0]
        exact.load_state_dict(pair(name, mesh, torch.bfloat16)[0].state_dict())
        one, two = pair(name, mesh, torch.bfloat16)
        reference = exact(x.bfloat16().double())[0]
        error = rms_ratio(one(x.bfloat16())[0], reference)
        close(two(x.bfloat16())[0], reference, name, error + 3 * torch.finfo(torch.bfloat16).eps)


def communication(mesh: DeviceMesh, folder: Path) -> None:
    """One sum forward; backward that of the input, and of the gradients of parameters that all hold."""
    for name, shared in (("gdn_gva", 1), ("kda", 3), ("gdp", 1), ("mamba2_groups", 0)):
        _, two = pair(name, mesh)
        x = torch.randn(1, 8, HIDDEN, dtype=torch.float64, requires_grad=True)
        with CommDebugMode() as forward:
            y = two(x)[0]
        with CommDebugMode() as backward:
            y.sum().backward()
        counts = forward.get_total_counts(), backward.get_total_counts()
        assert counts == (1, 1 + shared), counts
        with torch.no_grad(), mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            two(x)
        assert all_reduce.call_count == 1


def first_process_decides(mesh: DeviceMesh, folder: Path) -> None:
    """Parameters become those of the first process, and keep their marks and whether they are trained."""
    torch.manual_seed(mesh.get_local_rank())
    layer = MAKERS["kda"]()
    layer.q_proj.requires_grad_(False)
    layer = parallelize(layer, mesh)
    torch.manual_seed(0)
    expected = MAKERS["kda"]()
    for (name, x), y in zip(layer.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(whole(x), y), name
    assert layer.A_log._no_weight_decay and layer.dt_bias._no_weight_decay
    assert [n for n, p in layer.named_parameters() if not p.requires_grad] == ["q_proj.weight"]
    layer(torch.randn(1, 4, HIDDEN))[0].sum().backward()
    assert layer.q_proj.weight.grad is None and layer.k_proj.weight.grad is not None
    torch.manual_seed(mesh.get_local_rank())
    layer = MAKERS["gdp"]()
    layer.k_proj.requires_grad_(False)
    layer = parallelize(layer, mesh)
    torch.manual_seed(0)
    same_parameters(MAKERS["gdp"](), layer)
    layer(torch.randn(1, 4, HIDDEN))[0].sum().backward()
    assert all(block.grad is None for block in blocks(layer, "k_proj.weight"))


def state_dicts(mesh: DeviceMesh, folder: Path) -> None:
    """torch's full state dict is that of one device, and loads into another parallel layer."""
    for name in ("gdn_gva", "kda", "gdp", "mamba2"):
        one, two = pair(name, mesh)
        full = get_model_state_dict(two, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if mesh.get_local_rank() == 0:
            expected = one.state_dict()
            assert list(full) == list(expected)
            assert all(torch.equal(full[key], expected[key]) for key in full)
            torch.save(full, folder / name)
        dist.barrier()
        other = parallelize(MAKERS[name]().double(), mesh)
        set_model_state_dict(other, torch.load(folder / name), options=StateDictOptions(full_state_dict=True))
        with torch.device("meta"):
            empty = MAKERS[name]().double()
        empty = parallelize(empty, mesh).to_empty(device="cpu")
        if name in ("gdp", "mamba2"):
            # torch broadcasts what it finds among the parameters, where blocks have other names.
            set_model_state_dict(empty, torch.load(folder / name), options=StateDictOptions(full_state_dict=True))
        else:
            set_model_state_dict(
                empty,
                torch.load(folder / name) if mesh.get_local_rank() == 0 else {},
                options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            )
        x = torch.randn(1, 20, HIDDEN, dtype=torch.float64)
        for layer in (other, empty):
            assert torch.equal(layer(x)[0], two(x)[0])


def sharded_checkpoint(mesh: DeviceMesh, folder: Path) -> None:
    """Each process writes and reads rows of its own, which are not those of its heads, for any number of processes."""
    _, two = pair("gdp", mesh)
    checkpoint_state = get_model_state_dict(two)
    assert checkpoint_state["k_proj.weight"].to_local().shape[0] * mesh.size() == len(checkpoint_state["k_proj.weight"])
    torch.distributed.checkpoint.save(checkpoint_state, checkpoint_id=folder / "sharded")
    torch.manual_seed(1)
    other = parallelize(MAKERS["gdp"]().double(), mesh)
    state = get_model_state_dict(other)
    torch.distributed.checkpoint.load(state, checkpoint_id=folder / "sharded")
    set_model_state_dict(other, state)
    x = torch.randn(1, 20, HIDDEN, dtype=torch.float64)
    assert torch.equal(other(x)[0], two(x)[0])


def other_sizes(mesh: DeviceMesh, folder: Path) -> None:
    """A checkpoint of more updates is refused."""
    two = parallelize(MAKERS["gdp"](), mesh)
    state = MAKERS["gdp"]().state_dict()
    state["k_proj.weight"] = torch.cat([state["k_proj.weight"]] * 2)
    with pytest.raises(RuntimeError, match=r"k_proj\.weight"):
        set_model_state_dict(two, state, options=StateDictOptions(full_state_dict=True))


class Block(nn.Module):
    def __init__(self, mixer: str = "gdn_gva") -> None:
        super().__init__()
        self.norm = RMSNorm(HIDDEN)
        self.mixer = MAKERS[mixer]()
        self.mlp = GatedMLP(HIDDEN, intermediate_size=96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A block may read what belongs to a module below it.
        x = x * self.norm.weight
        x = x + self.mixer(hidden_states=self.norm(x))[0]
        return x + self.mlp(x=x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(11, HIDDEN)
        self.blocks = nn.ModuleList(Block(mixer) for mixer in ("gdn_gva", "gdp_bare"))
        self.head = nn.Linear(HIDDEN, 11, bias=False)
        self.head.weight = self.embeddings.weight

    def forward(self, tokens: torch.Tensor, recompute: bool) -> torch.Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return nn.functional.linear(x, self.head.weight)


def training(mesh: DeviceMesh, folder: Path) -> None:
    """Two steps of a model with tied embeddings, recomputed blocks, clipped gradients and AdamW."""
    for recompute in (False, True):
        torch.manual_seed(0)
        one = Model().double()
        two = parallelize(copy.deepcopy(one), mesh)
        assert two.head.weight is two.embeddings.weight and isinstance(two.head.weight, DTensor)
        tokens = torch.randint(11, (2, 40))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (one, two)]
        for _ in range(2):
            losses, norms = [], []
            for model, optimizer in zip((one, two), optimizers, strict=True):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(
                    model(tokens, recompute)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
                )
                loss.backward()
                norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
                losses.append(loss)
            close(losses[1], losses[0], "loss")
            close(norms[1], norms[0], "norm of the gradients")
            same_gradients(one, two)
            for optimizer in optimizers:
                optimizer.step()
        same_parameters(one, two)


def plan_of_torch(mesh: DeviceMesh, folder: Path) -> None:
    torch.manual_seed(0)
    one = Block().double()
    two = parallelize_module(copy.deepcopy(one), mesh, {"mixer": HeadParallel(), "mlp": HeadParallel()})
    assert not isinstance(two.norm.weight, DTensor) and two.mlp.up_proj.weight.placements == (Shard(0),)
    x = torch.randn(1, 30, HIDDEN, dtype=torch.float64)
    close(two(x), one(x), "output")


def parameters_stay(mesh: DeviceMesh, folder: Path) -> None:
    """After a forward pass that fails, and in a copy."""
    for name in ("gdn_gva", "gdp", "mamba2"):
        one, two = pair(name, mesh)
        x = torch.randn(1, 8, HIDDEN, dtype=torch.float64)
        with pytest.raises(ValueError, match="attention_mask"):
            two(x, attention_mask=torch.ones(3, 8))
        for layer in (two, copy.deepcopy(two)):
            assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in layer.parameters())
            close(layer(x)[0], one(x)[0], "output", rounded_gates(name))


def compiled(mesh: DeviceMesh, folder: Path) -> None:
    one, two = pair("gdn_gva", mesh)
    two.compile(backend="eager")
    forward_and_backward(one, two, torch.randn(1, 8, HIDDEN, dtype=torch.float64))
    assert all(isinstance(p, DTensor) for p in two.parameters())


def refusals(mesh: DeviceMesh, folder: Path) -> None:
    for heads, value_heads, name in ((3, 6, "num_heads=3"), (3, 3, "num_heads=3")):
        layer = nn.ModuleDict({"attn": GatedDeltaNet(HIDDEN, head_dim=16, num_heads=heads, num_v_heads=value_heads)})
        before = list(layer.parameters())
        with pytest.raises(ValueError, match=f"GatedDeltaNet 'attn' has {name}, mesh has world size 2"):
            parallelize(layer, mesh)
        assert all(x is y for x, y in zip(layer.parameters(), before, strict=True))
    with pytest.raises(ValueError, match=r"n_groups must be 1 or a multiple .* Mamba2 has n_groups=3, mesh"):
        parallelize(Mamba2(hidden_size=48, head_dim=16, n_groups=3), mesh)
    with pytest.raises(ValueError, match="intermediate_size=33"):
        parallelize(GatedMLP(HIDDEN, intermediate_size=33), mesh)
    with pytest.raises(ValueError, match=r"must be or contain one of .*GatedDeltaNet, .*got Linear"):
        parallelize(nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match="GatedDeltaProduct has num_heads=3, mesh has world size 2"):
        parallelize(GatedDeltaProduct(HIDDEN, head_dim=16, num_heads=3), mesh)
    with pytest.raises(ValueError, match=r"HeadParallel can cut .*got Linear"):
        parallelize_module(nn.Linear(2, 2), mesh, HeadParallel())
    with pytest.raises(ValueError, match="must not be parallel yet, but A_log of GatedDeltaNet is a DTensor"):
        parallelize(pair("gdn", mesh)[1], mesh)
    with pytest.raises(ValueError, match=r"one dimension, such as mesh\['tp'\].*got 2"):
        parallelize(MAKERS["gdn"](), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")))
    adapted = MAKERS["gdn"]()
    adapted.q_proj.lora = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"no parameters of others.*got q_proj\.lora"):
        parallelize(adapted, mesh)


def one_axis_of_a_mesh(mesh: DeviceMesh, folder: Path) -> None:
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    one = MAKERS["kda_gva"]().double()
    forward_and_backward(
        one, parallelize(copy.deepcopy(one), grid["tp"]), torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    )


CASES = [
    gated_delta_net,
    kimi_delta_attention,
    gated_delta_product,
    delta_net,
    gated_linear_attention,
    retention,
    mamba2,
    blocks_are_read_in_place,
    packed_and_padded,
    cached_decoding,
    half_precision,
    communication,
    first_process_decides,
    state_dicts,
    sharded_checkpoint,
    other_sizes,
    training,
    plan_of_torch,
    parameters_stay,
    compiled,
    refusals,
    one_axis_of_a_mesh,
]
