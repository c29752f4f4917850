"""The layers without a gated delta rule: FLA's arguments, parameters and initial values, which op runs, positions.

What all layers share, from the mathematics to every way of feeding tokens, `test_layers.py` tests for these too.
"""

import inspect
import pickle
from itertools import pairwise

import pytest
import torch

import fla_npu.layers.delta_net as delta_net_module
import fla_npu.layers.gla as gla_module
import fla_npu.layers.multiscale_retention as retention_module
import fla_npu.layers.simple_gla as simple_gla_module
from fla_npu.layers import DeltaNet, GatedLinearAttention, MultiScaleRetention, SimpleGatedLinearAttention
from fla_npu.models.utils import Cache

pytestmark = pytest.mark.filterwarnings("ignore:use_short_conv=False")

HIDDEN = 24
SMALL = {"hidden_size": HIDDEN, "num_heads": 2, "layer_idx": 0}
LAYERS = (DeltaNet, GatedLinearAttention, SimpleGatedLinearAttention, MultiScaleRetention)


def close(actual, expected, limit=2e-5):
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


# --- FLA's constructors --------------------------------------------------------------------------------------------

GROUPED = {
    "num_kv_heads": None,
    "feature_map": None,
    "use_short_conv": False,
    "conv_size": 4,
    "conv_bias": False,
    "use_output_gate": True,
    "gate_fn": "swish",
    "elementwise_affine": True,
    "norm_eps": 1e-5,
}
ARGUMENTS = {
    DeltaNet: {
        "mode": "chunk",
        "d_model": None,
        "hidden_size": 1024,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "num_heads": 4,
        "use_beta": True,
        "use_gate": False,
        "use_short_conv": True,
        "conv_size": 4,
        "conv_bias": False,
        "allow_neg_eigval": False,
        "layer_idx": None,
        "qk_activation": "silu",
        "qk_norm": "l2",
        "norm_eps": 1e-5,
        "kwargs": inspect.Parameter.empty,
    },
    GatedLinearAttention: {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "num_heads": 4,
        **GROUPED,
        "gate_logit_normalizer": 16,
        "gate_low_rank_dim": 16,
        "clamp_min": None,
        "fuse_norm": True,
        "layer_idx": None,
    },
    SimpleGatedLinearAttention: {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "num_heads": 4,
        **{name: default for name, default in GROUPED.items() if name != "use_output_gate"},
        "use_short_conv": True,
        "gate_logit_normalizer": 16,
        "fuse_norm": True,
        "layer_idx": None,
    },
    MultiScaleRetention: {
        "mode": "chunk",
        "hidden_size": 1024,
        "expand_k": 1.0,
        "expand_v": 2.0,
        "num_heads": 8,
        **GROUPED,
        "fuse_norm": True,
        "layer_idx": None,
        "kwargs": inspect.Parameter.empty,
    },
}
PARAMETERS = {
    DeltaNet: [
        *((f"{x}_proj.weight", (1024, 1024)) for x in "qkv"),
        ("b_proj.weight", (4, 1024)),
        *((f"{x}_conv1d.weight", (1024, 1, 4)) for x in "qkv"),
        ("o_norm.weight", (256,)),
        ("o_proj.weight", (1024, 1024)),
    ],
    GatedLinearAttention: [
        ("q_proj.weight", (512, 1024)),
        ("k_proj.weight", (512, 1024)),
        ("v_proj.weight", (1024, 1024)),
        ("g_proj.weight", (1024, 1024)),
        ("gk_proj.0.weight", (16, 1024)),
        ("gk_proj.1.weight", (512, 16)),
        ("gk_proj.1.bias", (512,)),
        ("o_proj.weight", (1024, 1024)),
        ("g_norm_swish_gate.weight", (256,)),
    ],
    SimpleGatedLinearAttention: [
        *((f"{x}_proj.weight", (1024, 1024)) for x in "qkvg"),
        *((f"{x}_conv1d.weight", (1024, 1, 4)) for x in "qkv"),
        ("gk_proj.weight", (4, 1024)),
        ("gk_proj.bias", (4,)),
        ("g_norm_swish_gate.weight", (256,)),
        ("o_proj.weight", (1024, 1024)),
    ],
    MultiScaleRetention: [
        ("q_proj.weight", (1024, 1024)),
        ("k_proj.weight", (1024, 1024)),
        ("v_proj.weight", (2048, 1024)),
        ("g_proj.weight", (2048, 1024)),
        ("o_proj.weight", (1024, 2048)),
        ("g_norm_swish_gate.weight", (256,)),
    ],
}


@pytest.mark.parametrize("cls", LAYERS)
def test_arguments_are_flas(cls):
    parameters = inspect.signature(cls).parameters
    assert [(p.name, p.default) for p in parameters.values()] == list(ARGUMENTS[cls].items())


@pytest.mark.parametrize("cls", LAYERS)
def test_default_parameters_are_flas(cls):
    with torch.device("meta"):
        layer = cls()
    assert [(n, tuple(p.shape)) for n, p in layer.named_parameters()] == PARAMETERS[cls]
    assert all(p.dtype == torch.float32 for p in layer.parameters())
    assert list(layer.state_dict()) == [n for n, _ in PARAMETERS[cls]]


@pytest.mark.parametrize(
    ("cls", "options", "shapes"),
    [
        (DeltaNet, {"d_model": 36}, {"q_proj.weight": (36, 36), "o_norm.weight": (18,), "g_proj.weight": None}),
        (
            DeltaNet,
            {"use_beta": False, "use_gate": True, "expand_k": 0.5, "expand_v": 2, "conv_bias": True, "conv_size": 3},
            {
                "b_proj.weight": None,
                "k_proj.weight": (12, 24),
                "g_proj.weight": (48, 24),
                "v_conv1d.weight": (48, 1, 3),
                "q_conv1d.bias": (12,),
                "o_norm.weight": (24,),
                "o_proj.weight": (24, 48),
            },
        ),
        (DeltaNet, {"use_short_conv": False}, {"q_conv1d.weight": None}),
        (
            GatedLinearAttention,
            {"num_kv_heads": 1, "use_short_conv": True, "gate_low_rank_dim": 3},
            {
                "q_proj.weight": (12, 24),
                "k_proj.weight": (6, 24),
                "v_proj.weight": (12, 24),
                "gk_proj.0.weight": (3, 24),
                "gk_proj.1.weight": (6, 3),
                "q_conv1d.weight": (12, 1, 4),
                "k_conv1d.weight": (6, 1, 4),
                "g_proj.weight": (24, 24),
            },
        ),
        (
            GatedLinearAttention,
            {"use_output_gate": False},
            {"g_proj.weight": None, "g_norm.weight": (12,), "g_norm_swish_gate.weight": None},
        ),
        (GatedLinearAttention, {"gate_fn": "sigmoid"}, {"g_norm.weight": (12,), "g_proj.weight": (24, 24)}),
        (
            SimpleGatedLinearAttention,
            {"num_kv_heads": 1, "use_short_conv": False, "fuse_norm": False, "elementwise_affine": False},
            {"gk_proj.weight": (2, 24), "v_proj.weight": (12, 24), "g_norm.weight": None, "q_conv1d.weight": None},
        ),
        (
            MultiScaleRetention,
            {"use_short_conv": True, "elementwise_affine": False},
            {"g_norm_swish_gate.weight": None, "v_conv1d.weight": (48, 1, 4)},
        ),
    ],
)
def test_optional_parameters(cls, options, shapes):
    parameters = dict(cls(**SMALL, **options).named_parameters())
    assert {name: tuple(parameters[name].shape) if name in parameters else None for name in shapes} == shapes


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (DeltaNet, {"b_proj.weight": 0.063072, "k_conv1d.weight": -0.164037, "o_proj.weight": 0.051365}),
        (GatedLinearAttention, {"gk_proj.1.bias": -0.236875, "o_proj.weight": 0.049666}),
        (SimpleGatedLinearAttention, {"gk_proj.bias": -0.048545, "o_proj.weight": 0.002114}),
        (MultiScaleRetention, {"g_proj.weight": -0.193408, "o_proj.weight": -0.083615}),
    ],
)
def test_initial_values_are_flas(cls, expected):
    """The very numbers that FLA 0.6.0 draws after the same seed: the order of the modules is its order."""
    torch.manual_seed(0)
    parameters = dict(cls(**SMALL).named_parameters())
    close({name: parameters[name].flatten()[0].item() for name in expected}, expected)


def test_state_size():
    layer = SimpleGatedLinearAttention(**SMALL, expand_v=2, num_kv_heads=1)
    assert layer.state_size() == 24 * 24 + 4 * (24 + 12 + 24)
    assert SimpleGatedLinearAttention(**SMALL, use_short_conv=False).state_size() == 24 * 12


@pytest.mark.parametrize("cls", [DeltaNet, MultiScaleRetention])
def test_unknown_options_are_ignored_where_fla_does(cls):
    cls(**SMALL, an_unknown_option=1)


@pytest.mark.parametrize("cls", LAYERS)
def test_a_layer_can_be_pickled(cls):
    layer, x = cls(**SMALL), torch.randn(1, 5, HIDDEN)
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], layer(x)[0])


# --- which op runs, and how ----------------------------------------------------------------------------------------

OPS = {
    DeltaNet: (delta_net_module, "delta_rule"),
    GatedLinearAttention: (gla_module, "gla"),
    SimpleGatedLinearAttention: (simple_gla_module, "simple_gla"),
    MultiScaleRetention: (retention_module, "simple_gla"),
}


def spied(cls, monkeypatch):
    """The calls that layers of a class will make: lists of the op's name and its arguments."""
    module, op = OPS[cls]
    calls = []

    def spy(name, original):
        def run(**kwargs):
            calls.append((name, kwargs))
            return original(**kwargs)

        return run

    for kind in ("chunk", "fused_recurrent", "fused_chunk", "parallel"):
        if original := getattr(module, f"{kind}_{op}", None):
            monkeypatch.setattr(module, f"{kind}_{op}", spy(kind, original))
    return calls


@pytest.mark.parametrize(
    ("mode", "T", "grad", "expected"),
    [
        ("chunk", 64, False, "fused_recurrent"),
        ("chunk", 65, False, "chunk"),
        ("fused_recurrent", 65, False, "fused_recurrent"),
        ("chunk", 65, True, "chunk"),
        ("chunk", 3, True, "chunk or fused_recurrent"),
        ("fused_recurrent", 65, True, "chunk or fused_recurrent"),
    ],
)
@pytest.mark.parametrize("cls", LAYERS)
def test_mode_rule(cls, mode, T, grad, expected, monkeypatch):
    """DeltaNet and GLA take the recurrent op for short inputs with autograd too, and then what `mode` says."""
    calls = spied(cls, monkeypatch)
    layer = cls(**SMALL, mode=mode)
    with torch.set_grad_enabled(grad):
        o = layer(torch.randn(1, T, HIDDEN))[0]
    if expected == "chunk or fused_recurrent":
        expected = "fused_recurrent" if cls in (DeltaNet, GatedLinearAttention) else "chunk"
    assert [name for name, _ in calls] == [expected]
    if grad:
        o.sum().backward()
        for name, p in layer.named_parameters():
            assert p.grad is not None and p.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (DeltaNet, {}, {"use_qk_l2norm_in_kernel": True, "state_v_first": None}),
        (DeltaNet, {"qk_norm": "sum"}, {"use_qk_l2norm_in_kernel": False}),
        (GatedLinearAttention, {}, {"state_v_first": True, "scale": None}),
        (SimpleGatedLinearAttention, {}, {"state_v_first": True, "scale": None}),
        (MultiScaleRetention, {}, {"state_v_first": None, "scale": None}),
    ],
)
def test_op_arguments(cls, options, expected, monkeypatch):
    calls = spied(cls, monkeypatch)
    layer = cls(**SMALL, **options).bfloat16()
    with torch.no_grad():
        layer(torch.randn(1, 70, HIDDEN).bfloat16())
    ((_, arguments),) = calls
    assert {name: arguments.get(name) for name in expected} == expected
    assert arguments["q"].dtype == arguments["k"].dtype == arguments["v"].dtype == torch.bfloat16
    if cls in (GatedLinearAttention, SimpleGatedLinearAttention):
        # A log decay that is rounded is off in the same direction for every token of a state.
        assert arguments["g"].dtype == torch.float32
        assert not torch.equal(arguments["g"].bfloat16().float(), arguments["g"])


@torch.no_grad()
def test_fused_chunk_gla_is_gone():
    layer = GatedLinearAttention(**SMALL, mode="fused_chunk")
    layer(torch.randn(1, 64, HIDDEN))
    with pytest.raises(NotImplementedError):
        layer(torch.randn(1, 65, HIDDEN))


@torch.no_grad()
def test_modes_of_retention_agree(monkeypatch):
    x, outputs = torch.randn(2, 70, HIDDEN), []
    calls = spied(MultiScaleRetention, monkeypatch)
    for mode in ("chunk", "fused_chunk", "parallel", "fused_recurrent"):
        torch.manual_seed(0)
        outputs.append(MultiScaleRetention(**SMALL, mode=mode)(x)[0])
    assert [name for name, _ in calls] == ["chunk", "fused_chunk", "parallel", "fused_recurrent"]
    for o in outputs[1:]:
        close(o, outputs[0])


@torch.no_grad()
def test_parallel_retention_keeps_the_state():
    """The parallel op has none: with a cache the layer runs another one."""
    torch.manual_seed(0)
    layer, x, cache = MultiScaleRetention(**SMALL, mode="parallel"), torch.randn(2, 140, HIDDEN), Cache()
    parts = [layer(x[:, a:b], past_key_values=cache, use_cache=True)[0] for a, b in ((0, 70), (70, 71))]
    parts.append(layer(x[:, 71:], past_key_values=cache)[0])
    close(torch.cat(parts, 1), layer(x)[0])


# --- positions -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_outputs_of_retention_depend_on_distances_alone():
    """Packed sequences, whose positions all start at zero, then tokens for each of them, then a batch that is not
    packed any more: as if every sequence had come alone. The count that a cache gives is that of all of them."""
    torch.manual_seed(0)
    layer, lens = MultiScaleRetention(**SMALL), [40, 0, 3, 90]
    x = torch.randn(4, 96, HIDDEN)
    cache, done, pieces = Cache(), [0] * 4, [[] for _ in range(4)]
    for new in (lens, [1, 2, 0, 1], [1] * 4):
        bounds = torch.tensor([0, *new]).cumsum(0)
        packed = torch.cat([x[n, a : a + more] for n, (a, more) in enumerate(zip(done, new, strict=True))])
        o = layer(packed[None], cu_seqlens=bounds, past_key_values=cache, use_cache=True)[0]
        for n, (a, b) in enumerate(pairwise(bounds.tolist())):
            pieces[n].append(o[0, a:b])
            done[n] += new[n]
    assert cache.get_seq_length() == sum(lens) + 4 + 4
    for _ in range(2):
        step = torch.stack([x[n, done[n]] for n in range(4)])[:, None]
        o = layer(step, past_key_values=cache, use_cache=True)[0]
        for n in range(4):
            pieces[n].append(o[n])
            done[n] += 1
    for n, parts in enumerate(pieces):
        close(torch.cat(parts), layer(x[n : n + 1, : done[n]])[0][0])


@torch.no_grad()
def test_packed_decoding_does_not_drift():
    """Turning the states of packed sequences forth and back for many calls costs no more than rounding."""
    torch.manual_seed(0)
    layer, x, cache = MultiScaleRetention(**SMALL), torch.randn(3, 400, HIDDEN), Cache()
    bounds = torch.arange(4)
    # The states after 2**20 tokens in other rows, which are empty: positions that fp32 angles cannot tell apart well.
    cache.update(recurrent_state=torch.zeros(3, 2, 12, 24), offset=2**20, layer_idx=0)
    o = [layer(x[None, :, t], cu_seqlens=bounds, past_key_values=cache, use_cache=True)[0][0] for t in range(400)]
    close(torch.stack(o, 1), layer(x)[0], 1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("masked", "before"), [(3, 0), (4, 0), (6, 0), (4, 2)])
def test_history_of_the_mask_sets_positions(masked, before):
    """Columns before the last T are those of cached tokens, and what may be `before` these says nothing."""
    torch.manual_seed(0)
    layer, x, cache = MultiScaleRetention(**SMALL), torch.randn(2, 10, HIDDEN), Cache()
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, :masked] = False
    first = layer(x[:, :6], attention_mask=mask[:, :6], past_key_values=cache, use_cache=True)[0]
    wide = torch.cat([mask.new_zeros(2, before), mask], 1)
    rest = layer(x[:, 6:], attention_mask=wide, past_key_values=cache, use_cache=True)[0]
    alone = layer(x[1:, masked:])[0][0]
    close(torch.cat([first, rest], 1)[1, masked:], alone)
    close(torch.cat([first, rest], 1)[0], layer(x[:1])[0][0])


@torch.no_grad()
def test_a_mask_of_the_new_tokens_alone():
    torch.manual_seed(0)
    layer, x, cache = MultiScaleRetention(**SMALL), torch.randn(2, 10, HIDDEN), Cache()
    layer(x[:, :6], past_key_values=cache, use_cache=True)
    mask = torch.ones(2, 4)
    mask[1, 2:] = 0
    o = layer(x[:, 6:], attention_mask=mask, past_key_values=cache, use_cache=True)[0]
    close(o[0], layer(x[:1])[0][0, 6:])
    close(o[1, :2], layer(x[1:, :8])[0][0, 6:])


# --- the rest ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", LAYERS)
def test_compiled(cls):
    """One graph without breaks; run as captured, since how it is turned to code is not ours."""
    torch._dynamo.reset()  # all layers share the code of their forward, and its graphs have a limit
    layer, x = cls(**SMALL), torch.randn(2, 70, HIDDEN)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    actual, expected = compiled(x)[0], layer(x)[0]
    close(actual, expected)
    gradients = [torch.autograd.grad(o.square().sum(), list(layer.parameters())) for o in (actual, expected)]
    for a, e in zip(*gradients, strict=True):
        close(a, e, 1e-4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: DeltaNet(**SMALL, expand_v=0.3),
            AssertionError,
            r"`hidden_size \* expand_v` must be an integer",
        ),
        (lambda: DeltaNet(16, num_heads=3), AssertionError, r"Not supported mode `16`"),
        (lambda: DeltaNet(hidden_size=16, num_heads=3), ValueError, r"expand_k` = 16 must be divisible by num_heads=3"),
        (lambda: DeltaNet(**SMALL, mode="parallel"), AssertionError, r"Not supported mode `parallel`, must be one of"),
        (lambda: DeltaNet(**SMALL, mode="fused_chunk"), NotImplementedError, r"use `chunk`"),
        (
            lambda: DeltaNet(**SMALL, qk_activation="gelu"),
            AssertionError,
            r"qk_activation must be .* got 'gelu'",
        ),
        (lambda: DeltaNet(**SMALL, qk_norm="l1"), AssertionError, r"qk_norm must be one of \('l2', 'sum'\), got 'l1'"),
        (lambda: GatedLinearAttention(**SMALL, mode="parallel"), AssertionError, r"Not supported mode `parallel`"),
        (lambda: GatedLinearAttention(**SMALL, num_kv_heads=4), AssertionError, r"num_heads=2 .* by num_kv_heads=4"),
        (lambda: GatedLinearAttention(**SMALL, num_kv_heads=0), ValueError, r"num_heads=2 .* by num_kv_heads=0"),
        (lambda: GatedLinearAttention(**SMALL, gate_fn="tanh"), ValueError, r"gate_fn must be one of .* got 'tanh'"),
        (lambda: GatedLinearAttention(**SMALL, gate_fn="bias_gelu"), ValueError, r"got 'bias_gelu'"),
        (lambda: GatedLinearAttention(**SMALL, an_unknown_option=1), TypeError, r"an_unknown_option"),
        (lambda: SimpleGatedLinearAttention(**SMALL, feature_map="t2r"), ValueError, r"feature_map .* got 't2r'"),
        (lambda: SimpleGatedLinearAttention(**SMALL, mode="fused_chunk"), AssertionError, r"Not supported mode"),
        (lambda: MultiScaleRetention(**SMALL, feature_map="sqrelu"), ValueError, r"feature_map .* got 'sqrelu'"),
        (lambda: MultiScaleRetention(hidden_size=6, num_heads=2), ValueError, r"must be even, got 3"),
    ],
)
def test_constructor_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_delta_net_without_convolutions_warns():
    with pytest.warns(UserWarning, match="crucial to the performance") as record:
        DeltaNet(**SMALL, use_short_conv=False)
    assert record[0].filename == __file__
