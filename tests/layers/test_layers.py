"""The layers: FLA's parameters, the mathematics, and every way of feeding them tokens against one pass."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch

import fla_npu.layers.gated_deltanet as gdn_module
import fla_npu.layers.gated_deltaproduct as product_module
import fla_npu.layers.gdn2 as gdn2_module
import fla_npu.layers.kda as kda_module
from fla_npu.errors import ShapeError
from fla_npu.layers import (
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNet2,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    MultiScaleRetention,
    SimpleGatedLinearAttention,
)
from fla_npu.layers.delta import DeltaLayer
from fla_npu.models.utils import Cache
from tests.layers import reference

pytestmark = pytest.mark.filterwarnings("ignore:use_short_conv=False")

HIDDEN = 24
SMALL = {"hidden_size": HIDDEN, "head_dim": 8, "num_heads": 2, "layer_idx": 0}
WIDTH = {"hidden_size": HIDDEN, "num_heads": 2, "layer_idx": 0}
"""Layers whose head sizes follow from their width have heads of 12 channels."""

VARIANTS = {
    "gdn": (GatedDeltaNet, {}),
    "gdn-gva": (GatedDeltaNet, {"num_v_heads": 4, "expand_v": 1.5}),
    "gdn-no-gate": (GatedDeltaNet, {"use_gate": False, "conv_bias": True, "conv_size": 3}),
    "gdn-sigmoid-gate": (GatedDeltaNet, {"output_gate_activation": "sigmoid", "allow_neg_eigval": True}),
    "gdn-no-conv": (GatedDeltaNet, {"use_short_conv": False, "num_v_heads": 4}),
    "kda": (KimiDeltaAttention, {}),
    "kda-gva": (KimiDeltaAttention, {"num_v_heads": 4, "expand_v": 2.5, "conv_bias": True}),
    "kda-safe": (KimiDeltaAttention, {"safe_gate": True, "lower_bound": -4.0, "allow_neg_eigval": True}),
    "kda-bounded": (KimiDeltaAttention, {"lower_bound": -6.0, "expand_v": 0.5}),
    "kda-no-conv": (KimiDeltaAttention, {"use_short_conv": False}),
    "gdn2": (GatedDeltaNet2, {}),
    "gdn2-gva": (GatedDeltaNet2, {"num_v_heads": 4, "expand_v": 1.5, "allow_neg_eigval": True, "conv_bias": True}),
    "gdn2-no-conv": (GatedDeltaNet2, {"use_short_conv": False}),
    "product": (GatedDeltaProduct, {}),
    "product-gva": (GatedDeltaProduct, {"num_v_heads": 4, "expand_v": 1.5, "num_householder": 3, "conv_bias": True}),
    "product-no-gates": (GatedDeltaProduct, {"use_output_gate": False, "use_forget_gate": False}),
    "product-of-one": (GatedDeltaProduct, {"num_householder": 1, "allow_neg_eigval": False, "use_short_conv": False}),
    "delta-net": (DeltaNet, {}),
    "delta-net-gate": (
        DeltaNet,
        {"use_gate": True, "allow_neg_eigval": True, "conv_bias": True, "expand_v": 2, "qk_activation": "identity"},
    ),
    "delta-net-no-conv": (
        DeltaNet,
        {"qk_activation": "elu", "qk_norm": "sum", "use_beta": False, "expand_k": 0.5, "use_short_conv": False},
    ),
    "gla": (GatedLinearAttention, {}),
    "gla-groups": (
        GatedLinearAttention,
        {
            "num_heads": 4,
            "num_kv_heads": 2,
            "use_short_conv": True,
            "clamp_min": -0.05,
            "feature_map": "sigmoid",
            "gate_fn": "gelu",
        },
    ),
    "gla-no-gate": (GatedLinearAttention, {"use_output_gate": False, "gate_logit_normalizer": 1, "expand_k": 1.5}),
    "simple-gla": (SimpleGatedLinearAttention, {}),
    "simple-gla-groups": (
        SimpleGatedLinearAttention,
        {
            "num_heads": 4,
            "num_kv_heads": 2,
            "use_short_conv": False,
            "fuse_norm": False,
            "elementwise_affine": False,
            "expand_k": 0.5,
        },
    ),
    "retention": (MultiScaleRetention, {}),
    "retention-groups": (
        MultiScaleRetention,
        {
            "num_heads": 4,
            "num_kv_heads": 2,
            "use_short_conv": True,
            "feature_map": "relu2",
            "gate_fn": "gelu",
            "expand_v": 1,
        },
    ),
}
K_FIRST = (GatedDeltaNet2, GatedDeltaProduct, DeltaNet, MultiScaleRetention)


def made(variant):
    """A small layer and, for the reference, the options that it was made with."""
    cls, options = VARIANTS[variant]
    layer = cls(**{**(SMALL if issubclass(cls, DeltaLayer) else WIDTH), **options})
    layer.reference = partial(reference.forward, **({} if isinstance(layer, DeltaLayer) else options))
    return layer


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=VARIANTS)
def layer(request):
    torch.manual_seed(0)
    layer = made(request.param).eval()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "norm" in name:
                p.normal_(1, 0.3)
            elif p.ndim == 2:
                p.mul_(3)
    return layer


def close(actual, expected, limit=2e-5):
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


# --- parameters ----------------------------------------------------------------------------------------------------

GDN_PARAMETERS = [
    ("A_log", (6,)),
    ("dt_bias", (6,)),
    ("q_proj.weight", (1536, 2048)),
    ("k_proj.weight", (1536, 2048)),
    ("v_proj.weight", (3072, 2048)),
    ("a_proj.weight", (6, 2048)),
    ("b_proj.weight", (6, 2048)),
    ("q_conv1d.weight", (1536, 1, 4)),
    ("k_conv1d.weight", (1536, 1, 4)),
    ("v_conv1d.weight", (3072, 1, 4)),
    ("g_proj.weight", (3072, 2048)),
    ("o_norm.weight", (512,)),
    ("o_proj.weight", (2048, 3072)),
]
KDA_PARAMETERS = [
    ("A_log", (16,)),
    ("dt_bias", (2048,)),
    ("q_proj.weight", (2048, 2048)),
    ("k_proj.weight", (2048, 2048)),
    ("v_proj.weight", (2048, 2048)),
    ("q_conv1d.weight", (2048, 1, 4)),
    ("k_conv1d.weight", (2048, 1, 4)),
    ("v_conv1d.weight", (2048, 1, 4)),
    ("f_proj.0.weight", (128, 2048)),
    ("f_proj.1.weight", (2048, 128)),
    ("b_proj.weight", (16, 2048)),
    ("g_proj.0.weight", (128, 2048)),
    ("g_proj.1.weight", (2048, 128)),
    ("g_proj.1.bias", (2048,)),
    ("o_norm.weight", (128,)),
    ("o_proj.weight", (2048, 2048)),
]
GDN2_PARAMETERS = [
    *KDA_PARAMETERS[:10],
    ("b_proj.weight", (2048, 2048)),
    ("w_proj.weight", (2048, 2048)),
    *KDA_PARAMETERS[11:],
]
PRODUCT_PARAMETERS = [
    ("A_log", (6,)),
    ("dt_bias", (6,)),
    ("q_proj.weight", (1536, 2048)),
    ("k_proj.weight", (3072, 2048)),
    ("v_proj.weight", (6144, 2048)),
    ("b_proj.weight", (12, 2048)),
    ("a_proj.weight", (6, 2048)),
    ("q_conv1d.weight", (1536, 1, 4)),
    ("k_conv1d.weight", (3072, 1, 4)),
    ("v_conv1d.weight", (6144, 1, 4)),
    *GDN_PARAMETERS[-3:],
]


@pytest.mark.parametrize(
    ("cls", "expected", "total"),
    [
        (GatedDeltaNet, GDN_PARAMETERS, 25_215_500),
        (KimiDeltaAttention, KDA_PARAMETERS, 17_887_376),
        (GatedDeltaNet2, GDN2_PARAMETERS, 26_243_216),
        (GatedDeltaProduct, PRODUCT_PARAMETERS, 34_683_404),
    ],
)
def test_default_parameters_are_flas(cls, expected, total):
    with torch.device("meta"):
        layer = cls()
    assert [(n, tuple(p.shape)) for n, p in layer.named_parameters()] == expected
    assert all(p.dtype == torch.float32 for p in layer.parameters())
    assert sum(p.numel() for p in layer.parameters()) == total
    assert list(layer.state_dict()) == [n for n, _ in expected] and not list(layer.buffers())
    assert {n for n, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)} == {"A_log", "dt_bias"}


def test_optional_parameters():
    names = set(dict(GatedDeltaNet(**SMALL, conv_bias=True, use_gate=False).named_parameters()))
    assert {"q_conv1d.bias", "k_conv1d.bias", "v_conv1d.bias"} <= names and "g_proj.weight" not in names
    names = set(dict(KimiDeltaAttention(**SMALL, use_short_conv=False).named_parameters()))
    assert not any("conv" in n for n in names)
    with pytest.warns(UserWarning, match="crucial to the performance"):
        GatedDeltaNet(**SMALL, use_short_conv=False)


def test_general_shapes():
    gdn = dict(GatedDeltaNet(**SMALL, num_v_heads=6, expand_v=1.5, conv_size=3, an_unknown_option=1).named_parameters())
    shapes = {n: tuple(p.shape) for n, p in gdn.items()}
    assert shapes["q_proj.weight"] == (16, HIDDEN) and shapes["v_proj.weight"] == (72, HIDDEN)
    assert shapes["a_proj.weight"] == (6, HIDDEN) and shapes["A_log"] == shapes["dt_bias"] == (6,)
    assert shapes["v_conv1d.weight"] == (72, 1, 3) and shapes["o_norm.weight"] == (12,)
    kda = dict(KimiDeltaAttention(**SMALL, num_v_heads=6, expand_v=1.5, an_unknown_option=1).named_parameters())
    shapes = {n: tuple(p.shape) for n, p in kda.items()}
    assert shapes["f_proj.0.weight"] == (12, HIDDEN) and shapes["f_proj.1.weight"] == (48, 12)
    assert shapes["dt_bias"] == (48,) and shapes["A_log"] == (6,)
    assert shapes["g_proj.1.weight"] == (72, 12) and shapes["o_proj.weight"] == (HIDDEN, 72)


GDN_A_LOG, GDN_DT_BIAS = [2.38678, 1.61162, 1.87073], [-3.6443, -5.2092, -5.01909]
KDA_A_LOG, KDA_DT_BIAS = [2.47393, 2.65179, 2.05202], [-2.58256, -6.29759, -6.36956]


def test_initial_values():
    """The ranges, and the very numbers that FLA 0.6.0 draws after the same seed."""
    torch.manual_seed(0)
    gdn = GatedDeltaNet(**{**SMALL, "num_heads": 64})
    torch.manual_seed(0)
    kda = KimiDeltaAttention(**{**SMALL, "num_heads": 64})
    for layer, low in ((gdn, 0), (kda, 1)):
        rates, steps = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
        assert rates.min() >= low and rates.max() <= 16 and rates.max() - rates.min() > 8
        assert steps.min() >= 1e-3 * 0.99 and steps.max() <= 0.1 * 1.01 and steps.max() > 20 * steps.min()
    close(gdn.A_log[:3].detach(), torch.tensor(GDN_A_LOG))
    close(gdn.dt_bias[:3].detach(), torch.tensor(GDN_DT_BIAS))
    close(kda.A_log[:3].detach(), torch.tensor(KDA_A_LOG))
    close(kda.dt_bias[:3].detach(), torch.tensor(KDA_DT_BIAS))
    assert not KimiDeltaAttention(**SMALL, safe_gate=True, lower_bound=-5).A_log.any()


# --- mathematics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [5, 70])
@pytest.mark.parametrize("grad", [False, True])
def test_matches_the_plain_layer(layer, T, grad):
    """T = 5 without autograd runs the recurrent op, the rest the chunk op."""
    torch.manual_seed(1)
    x = torch.randn(2, T, HIDDEN)
    expected = layer.reference(copy.deepcopy(layer).double(), x.double()).detach()
    with torch.set_grad_enabled(grad):
        o, weights, cache = layer(x)
    assert weights is None and cache is None and o.dtype == torch.float32
    close(o.detach().double(), expected)


def test_training_gradients(layer):
    torch.manual_seed(1)
    x, do = torch.randn(2, 67, HIDDEN), torch.randn(2, 67, HIDDEN)
    plain = copy.deepcopy(layer).double()
    x_plain = x.double().requires_grad_()
    expected = torch.autograd.grad(layer.reference(plain, x_plain), [x_plain, *plain.parameters()], do.double())
    layer.train()
    x.requires_grad_()
    actual = torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], do)
    for name, a, e in zip(["x", *dict(layer.named_parameters())], actual, expected, strict=True):
        error = (a.double() - e).norm() / (e.norm() + 1e-8)
        assert error < 1e-4, f"{name}: {error:.2e}"


def test_convolutions_together_equal_convolutions_apart():
    """FLA convolves q, k and v in one call where there is no state; the outputs must not differ by a bit."""
    from fla_npu.modules.convolution import causal_conv1d

    torch.manual_seed(0)
    layer = GatedDeltaNet(**SMALL, conv_bias=True)
    x = torch.randn(2, 70, HIDDEN)
    q, k, v, state = layer._mixed_qkv(x, None, False, None)
    assert state == (None, None, None)
    convs = layer.q_conv1d, layer.k_conv1d, layer.v_conv1d
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    together, _ = causal_conv1d(
        qkv, torch.cat([c.weight[:, 0] for c in convs]), torch.cat([c.bias for c in convs]), activation="silu"
    )
    assert torch.equal(torch.cat([q, k, v], -1), together)
    with_state, *_ = layer._mixed_qkv(x, None, True, None)
    assert torch.equal(q, with_state)


# --- every way of feeding tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[66, 67, 68], [1, 2, 3], [30, 65], [69], [3]])
def test_prefill_in_pieces_and_decoding_equal_one_pass(layer, cuts):
    torch.manual_seed(1)
    x = torch.randn(2, 70, HIDDEN)
    with torch.no_grad():
        whole = layer(x)[0]
        cache = Cache()
        pieces = [layer(x[:, a:b], past_key_values=cache, use_cache=True)[0] for a, b in pairwise([0, *cuts, 70])]
    close(torch.cat(pieces, 1), whole)
    assert cache.get_seq_length() == 70
    state = cache[0]
    sides = (layer.head_v_dim, layer.head_k_dim)
    heads = layer.value_dim // layer.head_v_dim
    assert state["recurrent_state"].shape == (2, heads, *(sides[::-1] if isinstance(layer, K_FIRST) else sides))
    assert state["recurrent_state"].dtype == torch.float32
    if layer.use_short_conv:
        sizes = (layer.q_proj.out_features, layer.k_proj.out_features, layer.v_proj.out_features)
        assert [tuple(s.shape) for s in state["conv_state"]] == [(2, d, layer.conv_size) for d in sizes]
    else:
        assert state["conv_state"] is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("grad", [False, True])
def test_padding_changes_nothing(layer, side, grad):
    """Outputs and states with padding are those of each sequence alone; outputs at padding are zero."""
    torch.manual_seed(1)
    lens, T = [70, 66, 3, 0], 70
    x = torch.randn(4, T, HIDDEN)
    mask = torch.zeros(4, T, dtype=torch.long)
    for row, n in zip(mask, lens, strict=True):
        row[T - n :] = 1 if side == "left" else 0
        row[:n] = 1 if side == "right" else row[:n]
    padded = torch.where(mask[..., None].bool(), x, float("nan"))
    cache = Cache()
    with torch.set_grad_enabled(grad):
        o, _, returned = layer(padded, attention_mask=mask, past_key_values=cache, use_cache=True)
        assert returned is cache and cache.get_seq_length() == T
        assert not o[mask == 0].any()
        for i in range(3):
            alone = Cache()
            tokens = x[i : i + 1, mask[i].bool()]
            close(o[i : i + 1, mask[i].bool()], layer(tokens, past_key_values=alone, use_cache=True)[0])
            close(cache[0]["recurrent_state"][i], alone[0]["recurrent_state"][0])
            if layer.use_short_conv:
                for packed, single in zip(cache[0]["conv_state"], alone[0]["conv_state"], strict=True):
                    close(packed[i], single[0])
        assert not cache[0]["recurrent_state"][3].any()


def test_left_padded_prefill_then_decoding(layer):
    """As generation does: the mask covers all tokens so far, its last columns count."""
    torch.manual_seed(1)
    x, T = torch.randn(2, 12, HIDDEN), 12
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, :4] = 0
    cache = Cache()
    with torch.no_grad():
        pieces = [
            layer(x[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, use_cache=True)[0]
            for a, b in pairwise([0, 9, 10, 11, 12])
        ]
        o = torch.cat(pieces, 1)
        close(o[0], layer(x[:1])[0][0])
        close(o[1, 4:], layer(x[1:, 4:])[0][0])


def test_decoding_with_a_paused_row(layer):
    """A zero in the mask of a decoding step leaves that row's states as they are."""
    torch.manual_seed(1)
    x = torch.randn(3, 6, HIDDEN)
    cache = Cache()
    with torch.no_grad():
        layer(x[:, :5], past_key_values=cache, use_cache=True)
        before = copy.deepcopy(cache[0])
        mask = torch.ones(3, 6)
        mask[1, 5] = 0
        o, *_ = layer(x[:, 5:], attention_mask=mask, past_key_values=cache, use_cache=True)
        close(o[[0, 2]], layer(x[[0, 2]])[0][:, 5:])
    assert not o[1].any()
    close(cache[0]["recurrent_state"][1], before["recurrent_state"][1], 0)
    for now, then in zip(cache[0]["conv_state"] or (), before["conv_state"] or (), strict=True):
        assert torch.equal(now[1], then[1]) and not torch.equal(now[0], then[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("grad", [False, True])
def test_packed_sequences_equal_separate_runs(layer, dtype, grad):
    torch.manual_seed(1)
    bounds = [0, 1, 1, 67, 70]
    x = torch.randn(1, 80, HIDDEN)
    cu_seqlens = torch.tensor(bounds, dtype=dtype)
    with torch.set_grad_enabled(grad):
        cache = Cache()
        first = layer(x[:, :70], cu_seqlens=cu_seqlens, past_key_values=cache, use_cache=True)[0]
        second = layer(x[:, 70:78], cu_seqlens=torch.tensor([0, 2, 4, 6, 8]), past_key_values=cache, use_cache=True)[0]
        third = layer(x[:, 70:74], cu_seqlens=torch.arange(5), past_key_values=cache, use_cache=True)[0]
        for n, (a, b) in enumerate(pairwise(bounds)):
            tokens = torch.cat([x[:, a:b], x[:, 70 + 2 * n : 72 + 2 * n], x[:, 70 + n : 71 + n]], 1)
            packed = torch.cat([first[:, a:b], second[:, 2 * n : 2 * n + 2], third[:, n : n + 1]], 1)
            close(packed, layer(tokens)[0])


def test_explicit_cu_seqlens_win_over_the_mask(layer):
    x, cu_seqlens = torch.randn(1, 8, HIDDEN), torch.tensor([0, 3, 8])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    assert torch.equal(layer(x, attention_mask=mask, cu_seqlens=cu_seqlens)[0], layer(x, cu_seqlens=cu_seqlens)[0])


def test_beams_can_be_reordered(layer):
    torch.manual_seed(1)
    x, beams = torch.randn(3, 7, HIDDEN), torch.tensor([2, 0, 0])
    cache = Cache()
    with torch.no_grad():
        layer(x[:, :5], past_key_values=cache, use_cache=True)
        kept = copy.deepcopy(cache)
        cache.reorder_cache(beams)
        tail = torch.cat([layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in (5, 6)], 1)
        close(tail, layer(torch.cat([x[beams, :5], x[:, 5:]], 1))[0][:, 5:])
        # Decoding writes into convolution states; those of the other cache are its own.
        tail = layer(x[:, 5:6], past_key_values=kept, use_cache=True)[0]
        close(tail, layer(x[:, :6])[0][:, 5:])


def test_reading_a_cache_without_use_cache_keeps_its_states(layer):
    torch.manual_seed(1)
    x = torch.randn(2, 8, HIDDEN)
    cache = Cache()
    with torch.no_grad():
        layer(x[:, :5], past_key_values=cache, use_cache=True)
        before = copy.deepcopy(cache[0])
        peek = [layer(x[:, 5 : 5 + n], past_key_values=cache)[0] for n in (1, 3)]
        whole = layer(x)[0]
    close(peek[0], whole[:, 5:6])
    close(peek[1], whole[:, 5:])
    assert torch.equal(cache[0]["recurrent_state"], before["recurrent_state"])
    for now, then in zip(cache[0]["conv_state"] or (), before["conv_state"] or (), strict=True):
        assert torch.equal(now, then)


def test_a_cache_of_a_model(layer):
    """Layers find their own entry."""
    second = copy.deepcopy(layer)
    second.layer_idx = 1
    x, cache = torch.randn(1, 4, HIDDEN), Cache()
    with torch.no_grad():
        layer(x, past_key_values=cache, use_cache=True)
        o = second(x, past_key_values=cache, use_cache=True)[0]
        assert torch.equal(o, layer(x)[0]) and len(cache) == 2
        cache.reset()
        assert torch.equal(layer(x, past_key_values=cache, use_cache=True)[0], o)


def test_half_precision(layer):
    torch.manual_seed(1)
    x = torch.randn(2, 20, HIDDEN)
    with torch.no_grad():
        expected = layer(x)[0]
        o = copy.deepcopy(layer).bfloat16()(x.bfloat16())[0]
    assert o.dtype == torch.bfloat16
    assert (o.float() - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoint_round_trip(variant):
    layer, other = made(variant), made(variant)
    x = torch.randn(1, 6, HIDDEN)
    assert not torch.equal(other(x)[0], layer(x)[0])
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other(x)[0], layer(x)[0])


# --- which op runs, and how ----------------------------------------------------------------------------------------


OPS_OF = {
    GatedDeltaNet: (gdn_module, "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    KimiDeltaAttention: (kda_module, "chunk_kda", "fused_recurrent_kda"),
    GatedDeltaNet2: (gdn2_module, "chunk_gdn2", "fused_recurrent_gdn2"),
    GatedDeltaProduct: (product_module, "chunk_gated_delta_product", "fused_recurrent_gated_delta_rule"),
}


@pytest.mark.parametrize(
    ("mode", "T", "grad", "training", "expected"),
    [
        ("chunk", 64, False, False, "recurrent"),
        ("chunk", 65, False, False, "chunk"),
        ("fused_recurrent", 65, False, False, "recurrent"),
        ("chunk", 1, True, False, "chunk"),
        ("fused_recurrent", 70, True, True, "chunk"),
        ("chunk", 3, False, True, "chunk"),
    ],
)
@pytest.mark.parametrize("cls", OPS_OF)
def test_mode_rule_and_op_arguments(cls, mode, T, grad, training, expected, monkeypatch):
    module, chunk, recurrent = OPS_OF[cls]
    calls = []

    def spy(name, op):
        def run(**kwargs):
            calls.append((name, kwargs))
            return op(**kwargs)

        return run

    monkeypatch.setattr(module, chunk, spy("chunk", getattr(module, chunk)))
    monkeypatch.setattr(module, recurrent, spy("recurrent", getattr(module, recurrent)))
    layer = cls(**SMALL, mode=mode, allow_neg_eigval=True).train(training)
    with torch.set_grad_enabled(grad):
        layer(torch.randn(1, T, HIDDEN))
    ((name, kwargs),) = calls
    assert name == ("chunk" if cls is GatedDeltaProduct else expected)  # its recurrent op is for NPUs
    assert kwargs["use_qk_l2norm_in_kernel"] is True and kwargs["output_final_state"] is False
    if cls in (GatedDeltaNet2, GatedDeltaProduct):
        updates = 2 if cls is GatedDeltaProduct else 1
        assert kwargs["k"].shape == (1, T * updates, 2, 8) and not kwargs.get("state_v_first")
        return
    for flag in (
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "state_v_first",
    ):
        assert kwargs[flag] is True, flag
    assert kwargs["A_log"] is layer.A_log and kwargs["dt_bias"] is layer.dt_bias
    assert kwargs["q"].shape == (1, T, 2, 8) and kwargs["output_final_state"] is False
    assert ("safe_gate" in kwargs) == (cls is KimiDeltaAttention and expected == "chunk")


@pytest.mark.parametrize("options", [{}, {"num_householder": 3, "num_v_heads": 4}, {"use_forget_gate": False}], ids=str)
def test_updates_as_tokens_of_the_recurrent_op(options, monkeypatch):
    """What `GatedDeltaProduct` does on NPUs for short inputs."""
    layer = GatedDeltaProduct(**SMALL, **options).eval()
    x = torch.randn(1, 12, HIDDEN)
    layer_on_npus = copy.deepcopy(layer)

    def attend(mode, q, k, v, hidden_states, **rest):
        def by_tokens(num_householder, use_qk_l2norm_in_kernel, **arguments):
            return layer_on_npus._token_by_token(**arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(product_module, "chunk_gated_delta_product", by_tokens)
            return GatedDeltaProduct.attend(layer_on_npus, mode, q, k, v, hidden_states, **rest)

    monkeypatch.setattr(layer_on_npus, "attend", attend)
    with torch.no_grad():
        for cu_seqlens in (None, torch.tensor([0, 1, 1, 7, 12])):
            ours, theirs = Cache(), Cache()
            feed = {"cu_seqlens": cu_seqlens, "use_cache": True}
            close(layer_on_npus(x, past_key_values=ours, **feed)[0], layer(x, past_key_values=theirs, **feed)[0])
            close(ours[0]["recurrent_state"], theirs[0]["recurrent_state"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GatedDeltaNet(**SMALL, expand_v=1.3), ValueError, r"expand_v=1.3 does not .* head_dim=8: 10.4"),
        (lambda: KimiDeltaAttention(**SMALL, expand_v=1.3), ValueError, r"expand_v=1.3 does not .* head_dim=8"),
        (lambda: GatedDeltaNet(**SMALL, num_v_heads=3), ValueError, r"num_v_heads=3 must be divisible by num_heads=2"),
        (lambda: KimiDeltaAttention(**SMALL, num_v_heads=1), ValueError, r"num_v_heads=1 must be divisible"),
        (
            lambda: GatedDeltaProduct(**SMALL, num_v_heads=3),
            ValueError,
            r"num_v_heads=3 must be divisible by num_heads=2",
        ),
        (lambda: GatedDeltaProduct(**SMALL, num_householder=0), ValueError, r"must be at least 1, got 0"),
        (lambda: GatedDeltaNet2(**SMALL, num_v_heads=1), ValueError, r"num_v_heads=1 must be divisible"),
        (lambda: GatedDeltaNet2(**SMALL, expand_v=1.3), ValueError, r"expand_v=1.3 does not .* head_dim=8: 10.4"),
        (lambda: GatedDeltaNet(**SMALL, mode="scan"), AssertionError, r"Not supported mode `scan`"),
        (lambda: GatedDeltaNet(**SMALL, output_gate_activation="relu"), ValueError, r"or 'sigmoid', got 'relu'"),
        (lambda: KimiDeltaAttention(**SMALL, safe_gate=True), ValueError, r"lower_bound in \[-5, 0\), got None"),
        (
            lambda: KimiDeltaAttention(**SMALL, safe_gate=True, lower_bound=-6),
            ValueError,
            r"lower_bound in \[-5, 0\), got -6",
        ),
    ],
)
def test_constructor_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_forward_refusals(layer):
    x = torch.randn(2, 6, HIDDEN)
    for mask in (torch.ones(2, 6, 6), torch.ones(2, 5), torch.ones(3, 6)):
        with pytest.raises(ShapeError, match=r"a 0-1 matrix .* batch_size=2 and seq_len of at least 6"):
            layer(x, attention_mask=mask)
    layer.layer_idx = None
    with pytest.raises(ValueError, match=rf"{type(layer).__name__} requires `layer_idx`"):
        layer(x, past_key_values=Cache())
    if isinstance(layer, DeltaLayer):
        layer.mode = "fused_recurrent"
        layer.train()
        with torch.no_grad(), pytest.raises(AssertionError, match=r"Only chunk mode is supported in training"):
            layer(x)
        layer.eval()
    with pytest.raises(ValueError, match=r"batch"):
        layer(x, cu_seqlens=torch.tensor([0, 6]))


@torch.no_grad()
@pytest.mark.parametrize("shape", [(0, 1), (0, 5), (2, 0)])
def test_empty_batch(layer, shape):
    """Sequences of no tokens leave a state that the first token continues."""
    cache, x = Cache(), torch.randn(shape[0], 3, HIDDEN)
    y, _, _ = layer(torch.zeros(*shape, HIDDEN), past_key_values=cache, use_cache=True)
    assert y.shape == (*shape, HIDDEN)
    if shape[1] == 0:
        close(layer(x, past_key_values=cache, use_cache=True)[0], layer(x)[0])


@torch.no_grad()
def test_a_batch_of_padding(layer):
    y, _, _ = layer(torch.full((2, 5, HIDDEN), float("nan")), attention_mask=torch.zeros(2, 5))
    assert not y.any()
