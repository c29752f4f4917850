"""What Mamba-2 models have of their own; the rest `test_modeling.py` and `test_generation.py` test for them too."""

import inspect

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers import Mamba2Config as TheirConfig
from transformers import Mamba2ForCausalLM as TheirModel

from fla_npu.models import Mamba2Config, Mamba2ForCausalLM, Mamba2Model
from tests.models.tiny import VOCABULARY, close, make, tokens


def test_fields():
    expected = {
        "head_dim": 64,
        "vocab_size": 32000,
        "hidden_size": 2048,
        "state_size": 128,
        "num_hidden_layers": 48,
        "norm_eps": 1e-5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "conv_init": None,
        "A_init_range": (1, 16),
        "D_has_hdim": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "residual_in_fp32": True,
        "dt_min": 0.001,
        "dt_max": 0.1,
        "dt_init_floor": 1e-4,
        "dt_limit": (0.0, float("inf")),
        "rescale_prenorm_residual": True,
        "use_cache": True,
        "rmsnorm": True,
        "norm_before_gate": False,
        "chunk_size": 256,
        "fuse_norm": True,
        "fuse_cross_entropy": True,
        "fuse_linear_cross_entropy": False,
        "use_l2warp": False,
        "tie_word_embeddings": False,
    }
    parameters = inspect.signature(Mamba2Config).parameters
    assert {name: p.default for name, p in parameters.items() if name != "kwargs"} == expected
    config = Mamba2Config()
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.num_heads == 64


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"A_init_range": (0, 1)}, "A_init_range must be two positive numbers in order"),
        ({"dt_min": 0.2}, "dt_min and dt_max must be positive and in order"),
        ({"dt_init_floor": 0}, "dt_init_floor must be positive"),
        ({"fuse_linear_cross_entropy": True}, "cannot both be True"),
    ],
)
def test_refused_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Mamba2Config(**fields)


def test_names_and_shapes():
    block = {
        "norm.weight": (32,),
        "mixer.dt_bias": (8,),
        "mixer.A_log": (8,),
        "mixer.D": (8,),
        "mixer.conv1d.weight": (128, 1, 4),
        "mixer.conv1d.bias": (128,),
        "mixer.in_proj.weight": (200, 32),
        "mixer.norm.weight": (64,),
        "mixer.out_proj.weight": (32, 64),
    }
    expected = {
        "backbone.embeddings.weight": (VOCABULARY, 32),
        "backbone.norm_f.weight": (32,),
        "lm_head.weight": (VOCABULARY, 32),
        **{f"backbone.layers.{i}.{name}": shape for i in range(3) for name, shape in block.items()},
    }
    assert {name: tuple(x.shape) for name, x in make("mamba").state_dict().items()} == expected


def test_initial_values():
    plain, scaled = (
        make("mamba", num_hidden_layers=1, hidden_size=128, conv_init=0.1, rescale_prenorm_residual=rescale)
        for rescale in (False, True)
    )
    for model in (plain, scaled):
        mixer = model.backbone.layers[0].mixer
        assert mixer.A_log.exp().min() >= 1 and mixer.A_log.exp().max() <= 16 and (mixer.D == 1).all()
        assert 0.09 < mixer.conv1d.weight.abs().max() <= 0.1 and not mixer.conv1d.bias.any()
        assert 0.19 < mixer.in_proj.weight.std() < 0.21
    assert 0.19 < plain.backbone.layers[0].mixer.out_proj.weight.std() < 0.21
    # Uniform up to 1 / sqrt(inputs), as torch does it.
    bound = 256**-0.5
    assert 0.99 * bound < scaled.backbone.layers[0].mixer.out_proj.weight.abs().max() <= bound


@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(tied, tmp_path):
    model, x = make("mamba", tie_word_embeddings=tied), tokens()
    model.save_pretrained(tmp_path)
    loaded = Mamba2ForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.dt_limit == (0.0, float("inf"))
    assert (loaded.lm_head.weight is loaded.backbone.embeddings.weight) == tied
    assert torch.equal(loaded(x).logits, model(x).logits)
    base = Mamba2Model.from_pretrained(tmp_path).eval()
    assert torch.equal(base(x).last_hidden_state, model.backbone(x).last_hidden_state)


@torch.no_grad()
def test_transformers_has_the_same_model(tmp_path):
    model, x = make("mamba"), tokens(length=70)
    sizes = {"hidden_size": 32, "head_dim": 8, "num_heads": 8, "state_size": 16, "n_groups": 2, "num_hidden_layers": 3}
    theirs = TheirModel(TheirConfig(**sizes, vocab_size=VOCABULARY, chunk_size=16, pad_token_id=0)).eval()
    theirs.load_state_dict(model.state_dict())
    close(model(x).logits, theirs(x, use_cache=False).logits)


def test_the_embeddings_of_state_spaces():
    model = make("mamba")
    state = model.state_dict()
    other = make("mamba", seed=1)
    state["backbone.embedding.weight"] = state.pop("backbone.embeddings.weight")
    other.load_state_dict(state)
    assert torch.equal(other.backbone.embeddings.weight, model.backbone.embeddings.weight)


def test_auto_classes():
    config = make("mamba").config
    assert isinstance(AutoConfig.for_model("mamba2"), TheirConfig)
    assert type(AutoModel.from_config(config)) is Mamba2Model
    assert type(AutoModelForCausalLM.from_config(config)) is Mamba2ForCausalLM
