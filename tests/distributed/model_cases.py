"""What two processes check together about language models, each against the whole model run by itself."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from fla_npu.distributed import parallelize
from fla_npu.models import (
    DeltaNetConfig,
    DeltaNetForCausalLM,
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    GatedDeltaProductConfig,
    GatedDeltaProductForCausalLM,
    GLAConfig,
    GLAForCausalLM,
    KDAConfig,
    KDAForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    RetNetConfig,
    RetNetForCausalLM,
)
from tests.distributed.cases import blocks, close, whole

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "head_dim": 8,
    "expand_v": 1.0,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 40,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True},
}


GROUPED: dict[str, Any] = {name: x for name, x in SIZES.items() if name != "head_dim"} | {"num_heads": 4}
"""Of the families whose head sizes follow from `hidden_size`."""


def gdn(**fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**{**SIZES, "num_v_heads": 4, **fields})).double()


def kda(**fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return KDAForCausalLM(KDAConfig(**{**SIZES, **fields})).double()


def gdp(**fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return GatedDeltaProductForCausalLM(GatedDeltaProductConfig(**{**SIZES, **fields})).double()


def gdp_in_blocks() -> PreTrainedModel:
    return gdp(num_householder=2, allow_neg_eigval=True)


def delta_net(**fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return DeltaNetForCausalLM(DeltaNetConfig(**{**GROUPED, **fields})).double()


def gla(**fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return GLAForCausalLM(GLAConfig(**{**GROUPED, "num_kv_heads": 2, **fields})).double()


def retnet(**fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return RetNetForCausalLM(RetNetConfig(**{**GROUPED, "num_kv_heads": 2, **fields})).double()


def mamba2() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size", "bos_token_id")}
    config = Mamba2Config(**sizes, head_dim=8, num_heads=8, state_size=8, pad_token_id=None, eos_token_id=None)
    return Mamba2ForCausalLM(config).double()


def same_training(one: PreTrainedModel, two: PreTrainedModel, **options: Any) -> None:
    tokens = torch.randint(40, (1, 30))
    losses = [m.train()(tokens, labels=tokens, **options).loss for m in (one, two)]
    close(losses[1], losses[0], "loss")
    for loss in losses:
        loss.backward()
    for name, x in one.named_parameters():
        gradients = [y.grad for y in blocks(two, name)]
        if x.grad is None:
            assert not any(y is not None for y in gradients), name
        else:
            close(torch.cat([whole(y) for y in gradients]), x.grad, f"gradient of {name}")
    assert one.lm_head.weight.grad is not None


def same_generation(one: PreTrainedModel, two: PreTrainedModel) -> None:
    tokens = torch.randint(40, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    for options in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}):
        a, b = (m.eval().generate(tokens, attention_mask=mask, max_new_tokens=6, **options) for m in (one, two))
        assert torch.equal(a, b), options


def language_models(mesh: DeviceMesh, folder: Path) -> None:
    for make in (gdn, kda, gdp_in_blocks, delta_net, gla, retnet, mamba2):
        one = make()
        two = parallelize(copy.deepcopy(one), mesh)
        assert all(isinstance(p, DTensor) for p in two.parameters())
        same_training(one, two, cu_seqlens=torch.tensor([0, 11, 30]))
        same_generation(one, two)


def parameters_read_elsewhere(mesh: DeviceMesh, folder: Path) -> None:
    """The loss takes the head's weight, attention residuals those of norms."""
    one = gdn(
        attnres_block_size=2,
        fuse_cross_entropy=False,
        fuse_linear_cross_entropy=True,
        tie_word_embeddings=True,
        attn=None,
    )
    two = parallelize(copy.deepcopy(one), mesh)
    assert two.lm_head.weight is two.model.embeddings.weight
    same_training(one, two)


def gradient_checkpointing(mesh: DeviceMesh, folder: Path) -> None:
    for use_reentrant in (False, True):
        one, two = kda(), parallelize(kda(), mesh)
        two.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        same_training(one, two)


def plan_of_transformers(mesh: DeviceMesh, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot load GatedDeltaProduct .*k_proj\.weight.*parallelize\(model, mesh\)"):
        two = gdp_in_blocks()
        apply_tensor_parallelism(two, mesh, two._expand_parallel_plan(two.tp_plan))
    for make in (gdn, kda, gdp, delta_net, gla, retnet):
        one, two = make(), make()
        apply_tensor_parallelism(two, mesh, two._expand_parallel_plan(two.tp_plan))
        cut = {name for name, p in two.named_parameters() if isinstance(p, DTensor)}
        assert cut == {name for name, _ in two.named_parameters() if ".attn." in name or ".mlp." in name}
        same_training(one, two)


def from_pretrained(mesh: DeviceMesh, folder: Path) -> None:
    for make in (gdn, kda, retnet):
        first, second = folder / f"{make.__name__}_first", folder / f"{make.__name__}_second"
        if mesh.get_local_rank() == 0:
            make().save_pretrained(first)
        dist.barrier()
        one = type(make()).from_pretrained(first)
        two = type(one).from_pretrained(first, distributed_config=DistributedConfig(tp_size=mesh.size()))
        assert isinstance(two.model.layers[0].attn.q_proj.weight, DTensor)
        same_training(one, two)
        same_generation(one, two)
        two.save_pretrained(second)
        dist.barrier()
        for (name, x), y in zip(one.named_parameters(), type(one).from_pretrained(second).parameters(), strict=True):
            assert torch.equal(x, whole(y)), name


CASES = [language_models, parameters_read_elsewhere, gradient_checkpointing, plan_of_transformers]
