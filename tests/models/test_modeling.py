"""The models: names, one pass against pieces, tokens, padding and packing, training, saving and compiling."""

import copy
import pickle
from itertools import pairwise
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForCausalLM

from fla_npu.models import KDAForCausalLM
from fla_npu.models.modeling_utils import CACHE
from fla_npu.models.utils import Cache
from tests.models.tiny import FAMILIES, KINDS, VOCABULARY, close, config, family, make, tokens

OURS = [family for family in FAMILIES if family != "mamba"]
"""Whose names and model types transformers does not have; of Mamba-2, which it has, `test_mamba2.py` tests these."""

BLOCK = {"attn_norm.weight": (32,), "mlp_norm.weight": (32,)} | {
    f"mlp.{name}_proj.weight": shape for name, shape in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48)))
}
SHARED = {
    "q_proj.weight": (16, 32),
    "k_proj.weight": (16, 32),
    "b_proj.weight": (4, 32),
    "q_conv1d.weight": (16, 1, 4),
    "k_conv1d.weight": (16, 1, 4),
    "A_log": (4,),
}
# FLA's names and shapes for the sizes of `tiny.py`.
MIXERS = {
    "delta": {
        "q_proj.weight": (16, 32),
        "k_proj.weight": (16, 32),
        "v_proj.weight": (32, 32),
        "b_proj.weight": (2, 32),
        "q_conv1d.weight": (16, 1, 4),
        "k_conv1d.weight": (16, 1, 4),
        "v_conv1d.weight": (32, 1, 4),
        "o_norm.weight": (16,),
        "o_proj.weight": (32, 32),
    },
    "gdn": SHARED
    | {
        "dt_bias": (4,),
        "a_proj.weight": (4, 32),
        "v_proj.weight": (64, 32),
        "v_conv1d.weight": (64, 1, 4),
        "g_proj.weight": (64, 32),
        "o_norm.weight": (16,),
        "o_proj.weight": (32, 64),
    },
    "kda": SHARED
    | {
        "dt_bias": (32,),
        "v_proj.weight": (32, 32),
        "v_conv1d.weight": (32, 1, 4),
        "f_proj.0.weight": (8, 32),
        "f_proj.1.weight": (32, 8),
        "g_proj.0.weight": (8, 32),
        "g_proj.1.weight": (32, 8),
        "g_proj.1.bias": (32,),
        "o_norm.weight": (8,),
        "o_proj.weight": (32, 32),
    },
    "product": {
        "q_proj.weight": (16, 32),
        "k_proj.weight": (32, 32),
        "v_proj.weight": (64, 32),
        "a_proj.weight": (2, 32),
        "b_proj.weight": (4, 32),
        "q_conv1d.weight": (16, 1, 4),
        "k_conv1d.weight": (32, 1, 4),
        "v_conv1d.weight": (64, 1, 4),
        "A_log": (2,),
        "dt_bias": (2,),
        "g_proj.weight": (32, 32),
        "o_norm.weight": (16,),
        "o_proj.weight": (32, 32),
    },
    "gla": {
        "q_proj.weight": (16, 32),
        "k_proj.weight": (8, 32),
        "v_proj.weight": (16, 32),
        "g_proj.weight": (32, 32),
        "gk_proj.0.weight": (16, 32),
        "gk_proj.1.weight": (8, 16),
        "gk_proj.1.bias": (8,),
        "g_norm_swish_gate.weight": (8,),
        "o_proj.weight": (32, 32),
    },
    "retnet": {
        "q_proj.weight": (32, 32),
        "k_proj.weight": (16, 32),
        "v_proj.weight": (32, 32),
        "g_proj.weight": (64, 32),
        "g_norm_swish_gate.weight": (16,),
        "o_proj.weight": (32, 64),
    },
    "attention": {f"{x}_proj.weight": (16 if x in "kv" else 32, 32) for x in "qkvo"},
}
RESIDUALS = {
    f"{part}_res_{name}.weight": shape
    for part in ("attn", "mlp")
    for name, shape in (("proj", (1, 32)), ("norm", (32,)))
}

DELTA = {"allow_neg_eigval": True, "conv_size": 3, "use_short_conv": True, "expand_v": 1.5}


@pytest.mark.parametrize("kind", [*OURS, "kda hybrid", "kda residuals"])
def test_names_and_shapes(kind):
    expected = {
        "model.embeddings.weight": (VOCABULARY, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (VOCABULARY, 32),
    }
    for i in range(3):
        mixer = MIXERS["attention" if kind.endswith("hybrid") and i == 1 else kind.split()[0]]
        block = BLOCK | {f"attn.{name}": shape for name, shape in mixer.items()}
        block |= RESIDUALS if kind.endswith("residuals") else {}
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    if kind.endswith("residuals"):
        expected |= {"model.res_proj.weight": (1, 32), "model.res_norm.weight": (32,)}
    assert {name: tuple(x.shape) for name, x in make(kind).state_dict().items()} == expected


@pytest.mark.parametrize(
    "kind, own, found",
    [
        ("delta", {"use_gate": True, "use_beta": False, "qk_norm": "sum", "qk_activation": "relu"} | DELTA, {}),
        ("delta", {"expand_k": 2.0}, {"head_k_dim": 32}),
        ("gdn", {"use_gate": False} | DELTA, {}),
        ("gdn", {"output_gate_activation": "sigmoid"}, {"o_norm.activation": "sigmoid"}),
        (
            "gla",
            {"num_kv_heads": 1, "expand_k": 1.0, "expand_v": 0.5, "use_output_gate": False, "clamp_min": -1.0},
            {},
        ),
        ("gla", {"use_short_conv": True, "conv_size": 3, "fuse_norm": False}, {"fuse_norm_and_gate": False}),
        (
            "gla",
            {"feature_map": "relu", "elementwise_affine": False},
            {"feature_map_fn": F.relu, "g_norm_swish_gate.weight": None},
        ),
        ("retnet", {"num_kv_heads": 1, "expand_k": 0.5, "expand_v": 1.0, "use_output_gate": False}, {}),
        (
            "retnet",
            {"feature_map": "gelu", "fuse_norm": False},
            {"feature_map_fn": F.gelu, "fuse_norm_and_gate": False},
        ),
        ("kda", {"safe_gate": True, "lower_bound": -3.0} | DELTA, {}),
        ("product", {"use_output_gate": False, "use_forget_gate": False, "num_householder": 3} | DELTA, {}),
    ],
)
def test_fields_reach_the_layers(kind, own, found):
    """`found` are attributes of the layer; without them the fields are, too."""
    attention = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 5, "rope_theta": 500.0}
    attention["qkv_bias"] = True
    fields = {"attn_mode": "fused_recurrent", "norm_eps": 1e-3, "max_position_embeddings": 77, "attn": attention}
    blocks = make(kind, **fields, **own).model.layers
    mixer = blocks[0].attn
    expected = found or own
    assert {name: attrgetter(name)(mixer) for name in expected} == expected
    (norm,) = (child for name, child in mixer.named_children() if "norm" in name)
    assert mixer.mode == "fused_recurrent" and norm.eps == blocks[0].attn_norm.eps == 1e-3
    del attention["layers"]
    assert {name: getattr(blocks[1].attn, name) for name in attention} == attention
    assert blocks[1].attn.max_position_embeddings == 77 and blocks[1].attn.q_proj.bias is not None


def test_initial_weights():
    gdn, kda, safe = (
        make(kind, num_heads=8, num_v_heads=8).model.layers[0].attn for kind in ("gdn", "kda", "kda hybrid")
    )
    product = make("product", num_heads=8).model.layers[0].attn
    for layer, low in ((gdn, 0), (kda, 1), (product, 0)):
        rates = layer.A_log.exp()
        assert low <= rates.min() and rates.max() <= 16 and rates.std() > 1
    assert (safe.A_log == 0).all()
    for layer in (gdn, kda, product):
        dt = F.softplus(layer.dt_bias)
        assert dt.min() > 9e-4 and dt.max() < 0.11 and layer.A_log._no_weight_decay
    assert 0.15 < gdn.q_proj.weight.std() < 0.25 and (gdn.o_norm.weight == 1).all()
    assert (make("gla").model.layers[0].attn.gk_proj[1].bias == 0).all()
    residuals = make("kda residuals").model
    assert (residuals.res_proj.weight == 0).all() and (residuals.layers[1].mlp_res_proj.weight == 0).all()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_attention_residuals(size):
    """The input of sub-layer i: the embeddings, the sums of the blocks of `size` sub-layers before it, and the sum of
    those before it in its own block, each weighted by how its norm matches the query."""
    model = make("kda residuals", attnres_block_size=size).model
    for name, parameter in model.named_parameters():
        if "res_" in name:
            torch.nn.init.normal_(parameter)
    inputs, outputs = [], []
    for layer in model.layers:
        for part in (layer.attn, layer.mlp):
            part.register_forward_pre_hook(
                lambda _, args, kwargs: inputs.append(kwargs.get("hidden_states", *args)), with_kwargs=True
            )
            part.register_forward_hook(lambda _, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    x = tokens()
    with torch.no_grad():
        last = model(x).last_hidden_state

        def mixture(i, query, norm, output_norm):
            blocks = [outputs[start : min(start + size, i)] for start in range(0, i, size)]
            sources = torch.stack([model.embeddings(x), *(sum(block) for block in blocks)])
            match = F.rms_norm(sources, (32,), norm.weight, 1e-6) @ query.weight[0]
            return F.rms_norm((match.softmax(0)[..., None] * sources).sum(0), (32,), output_norm.weight, 1e-6)

        for i, layer in enumerate(model.layers):
            close(inputs[2 * i], mixture(2 * i, layer.attn_res_proj, layer.attn_res_norm, layer.attn_norm))
            close(inputs[2 * i + 1], mixture(2 * i + 1, layer.mlp_res_proj, layer.mlp_res_norm, layer.mlp_norm))
        close(last, mixture(6, model.res_proj, model.res_norm, model.norm))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_tokens_and_one_pass_agree(kind):
    model, x = make(kind), tokens()
    with torch.no_grad():
        full = model(x, use_cache=False).logits
        for sizes in ([12, 11], [1] * 23, [9, 1, 1, 5, 7]):
            cache, parts = Cache(), []
            for piece in x.split(sizes, dim=1):
                out = model(piece, past_key_values=cache, use_cache=True)
                assert out[CACHE] is cache
                parts.append(out.logits)
            close(torch.cat(parts, 1), full)
            assert cache.get_seq_length() == 23 and len(cache) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_count(kind):
    """Left, right and both; in one pass and, where the padding is on the left, continued from a cache."""
    model, x = make(kind), tokens(3, 20)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[0, :6], mask[1, 15:], mask[2, :3], mask[2, 18:] = 0, 0, 0, 0
    rows = [x[i : i + 1, mask[i].bool()] for i in range(3)]
    with torch.no_grad():
        alone = [model(row).logits[0] for row in rows]
        together = model(x, attention_mask=mask).logits
        for i in range(3):
            close(together[i, mask[i].bool()], alone[i])
        left = mask.clone()
        left[1] = left[2] = 1
        alone = [model(x[i : i + 1, left[i].bool()]).logits[0] for i in range(3)]
        cache, parts = Cache(), []
        for start, end in ((0, 4), (4, 13), (13, 14), (14, 20)):
            out = model(x[:, start:end], attention_mask=left[:, :end], past_key_values=cache, use_cache=True)
            parts.append(out.logits)
        for i in range(3):
            close(torch.cat(parts, 1)[i, left[i].bool()], alone[i])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_separate(kind):
    model, x = make(kind), tokens(1, 30)
    bounds = [0, 7, 7, 8, 30]
    with torch.no_grad():
        packed = model(x, cu_seqlens=torch.tensor(bounds)).logits
        for start, end in pairwise(bounds):
            if start < end:
                close(packed[:, start:end], model(x[:, start:end]).logits)


def test_what_forward_takes_and_returns():
    model, x = make("gdn hybrid"), tokens()
    with torch.no_grad():
        out = model(x, output_hidden_states=True)
        assert isinstance(out[CACHE], Cache) and len(out.hidden_states) == 4
        close(model.lm_head(out.hidden_states[-1]), out.logits)
        close(model(inputs_embeds=model.get_input_embeddings()(x)).logits, out.logits)
        for kept in (5, torch.arange(18, 23)):
            close(model(x, logits_to_keep=kept).logits, out.logits[:, -5:])
        close(model(x, num_logits_to_keep=1).logits, out.logits[:, -1:])
        assert model(x, logits_to_keep=None).logits.shape == out.logits.shape
        logits, cache = model(x, return_dict=False)
        assert torch.equal(logits, out.logits) and isinstance(cache, Cache)
        close(model(x[:, 12:], cache=model(x[:, :12])[CACHE]).logits, out.logits[:, 12:])
        assert CACHE not in model(x, use_cache=False) and CACHE not in model.train()(x)
        model.eval()
        state = model(x[:, :12])[CACHE].to_legacy_cache()
        close(model(x[:, 12:], past_key_values=Cache.from_legacy_cache(state, 12)).logits, out.logits[:, 12:])
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="one of cache and past_key_values"):
        model(x, cache=Cache(), past_key_values=Cache())
    with pytest.raises(TypeError, match="Expected an FLA cache"):
        model(x, past_key_values=object())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("l2warp", [False, True])
def test_losses_and_gradients_agree(kind, l2warp):
    """Plain, with the fused cross entropy, and with head and loss fused: one loss, one gradient."""
    x = tokens()
    labels = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.2, -100, x)
    choices = [{"fuse_cross_entropy": False}, {"fuse_cross_entropy": True}]
    if hasattr(config(kind), "fuse_linear_cross_entropy"):
        choices.append({"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True})
    results = []
    for choice in choices:
        with pytest.warns(UserWarning) if len(choice) > 1 else torch.no_grad():
            model = make(kind, use_l2warp=l2warp, **choice).train()
        out = model(x, labels=labels)
        out.loss.backward()
        results.append((out, {name: p.grad for name, p in model.named_parameters()}))
        whole = model(x, labels=labels, num_items_in_batch=torch.tensor(7))
        torch.testing.assert_close(whole.loss * 7, out.loss * (labels[:, 1:] != -100).sum())
    (out, gradients), *others = results
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    for other, other_gradients in others:
        torch.testing.assert_close(other.loss, out.loss)
        for name, gradient in gradients.items():
            close(other_gradients[name], gradient, 1e-4)
    assert results[-1][0].logits is None
    if kind == "kda":
        assert make(kind)(x, labels=labels).logits is not None


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind):
    model, x = make(kind).train(), tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x, labels=x).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    for name, p in model.named_parameters():
        # The first sub-layer has one residual, whatever its query.
        unused = "layers.0.attn_res" in name
        assert p.grad is None if unused else p.grad.isfinite().all() and p.grad.abs().max() > 0, name
    assert losses[0] > losses[1] > losses[2]


def test_own_criterion():
    model, x = make("gdn"), tokens()
    model.criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    expected = F.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(model(x, labels=x).loss, expected)
    torch.testing.assert_close(model(x, labels=x, num_items_in_batch=4).loss, expected * x[:, 1:].numel() / 4)
    assert model.criterion.reduction == "mean"


@pytest.mark.parametrize("kind", [*FAMILIES, "gdn window", "kda hybrid", "kda residuals"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing(kind):
    x = tokens()
    gradients, runs = [], []
    for checkpointing in (False, True):
        model = make(kind).train()
        if checkpointing:
            # Reentrant checkpoints, the default before transformers 5, know no tensors within lists.
            model.gradient_checkpointing_enable({"use_reentrant": False})
        block = model.base_model.layers[1]
        part = block.mixer if kind == "mamba" else block.mlp
        part.register_forward_pre_hook(lambda *_, run=checkpointing: runs.append(run))
        out = model(x, labels=x, use_cache=checkpointing)
        assert CACHE not in out
        out.loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert runs == [False, True, True]
    for name, gradient in gradients[0].items():
        # The first layer has one residual, whose query nothing depends on.
        assert gradient is None or torch.equal(gradients[1][name], gradient), name


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"preserve_rng_state": False}])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_reentrant_checkpoints_of_attention_residuals_are_refused(options):
    """They handle no gradients of tensors in a list, as the residuals are: torch fails in the backward pass."""
    model, x = make("kda residuals"), tokens()
    model.gradient_checkpointing_enable(options)
    expected = model(x).logits
    model.train()
    with torch.no_grad():
        close(model(x).logits, expected)
    with pytest.raises(ValueError, match="attnres_block_size does not go with reentrant gradient checkpoints"):
        model(x)


@pytest.mark.parametrize(
    "kind, tied", [(kind, i % 2 == 0) for i, kind in enumerate([*OURS, "gdn hybrid", "kda residuals"])]
)
def test_save_and_load(kind, tied, tmp_path):
    model, x = make(kind, tie_word_embeddings=tied), tokens()
    model.save_pretrained(tmp_path)
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    with torch.no_grad():
        expected = model(x).logits
        for loader in (type(model), AutoModelForCausalLM):
            loaded = loader.from_pretrained(tmp_path).eval()
            assert type(loaded) is type(model) and torch.equal(loaded(x).logits, expected)
            assert (loaded.lm_head.weight is loaded.model.embeddings.weight) == tied
        base = AutoModel.from_pretrained(tmp_path).eval()
        assert torch.equal(base(x).last_hidden_state, model.model(x).last_hidden_state)
        half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert half(x).logits.isfinite().all() and half.lm_head.weight.dtype == torch.bfloat16
        for loaded_parameter, parameter in zip(half.parameters(), model.parameters(), strict=True):
            # Some stay in fp32, such as the decay rates.
            assert torch.equal(loaded_parameter, parameter.to(loaded_parameter.dtype))


@pytest.mark.parametrize("kind", ["gdn", "kda", "product"])
def test_marks_against_weight_decay_outlive_what_makes_parameters_anew(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path)
    expected = {name for name, _ in model.named_parameters() if name.split(".")[-1] in ("A_log", "dt_bias")}
    for changed in (
        model,
        type(model).from_pretrained(tmp_path, dtype=torch.bfloat16),
        copy.deepcopy(model).double(),
        copy.deepcopy(model).to("meta").to_empty(device="cpu"),
        pickle.loads(pickle.dumps(model)),
    ):
        marked = {name for name, p in changed.named_parameters() if getattr(p, "_no_weight_decay", False)}
        assert marked == expected


def test_missing_weights_get_initial_ones(tmp_path):
    model = make("kda")
    # Of the first layer only one of the parameters that are set together.
    missing = ("layers.1.attn", "layers.0.attn.dt_bias")
    state = {name: x for name, x in model.state_dict().items() if not any(part in name for part in missing)}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = KDAForCausalLM.from_pretrained(tmp_path)
    for name, x in loaded.state_dict().items():
        assert x.isfinite().all()
        assert torch.equal(x, model.state_dict()[name]) or name not in state, name
    rates = loaded.model.layers[1].attn.A_log.exp()
    assert rates.min() >= 1 and rates.max() <= 16
    assert F.softplus(loaded.model.layers[1].attn.dt_bias).min() > 1e-4


def test_compiled():
    """One graph without breaks; run as captured, since how it is turned to code is not ours."""
    model, x = make("gdn hybrid", num_hidden_layers=2), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(x, use_cache=False).logits, model(x, use_cache=False).logits)
    compiled(x, labels=x, use_cache=False).loss.backward()
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x, labels=x, use_cache=False).loss.backward()
    for name, p in model.named_parameters():
        close(got[name], p.grad, 1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_auto_classes_know_the_families(kind):
    assert type(AutoModel.from_config(config(kind))) is family(kind).model_class
    assert type(AutoModelForCausalLM.from_config(config(kind))) is family(kind)
