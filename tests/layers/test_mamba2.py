"""Mamba2 against its definition, one token after the other in float64, and every way of feeding tokens."""

import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.layers import Mamba2, mamba2
from fla_npu.models.utils import Cache
from fla_npu.utils import get_err_ratio

SIZES = {"hidden_size": 24, "head_dim": 8, "state_size": 10, "layer_idx": 0}
KINDS = {
    "plain": {},
    "groups": {"n_groups": 3, "use_bias": True, "conv_init": 0.3},
    "channels of D": {"D_has_hdim": True, "norm_before_gate": True, "use_conv_bias": False, "dt_limit": (0.01, 0.05)},
    "no norm": {"rmsnorm": False, "hidden_act": "gelu", "conv_kernel": 3},
}
# fp32 through two projections, a convolution and the op, each of whose sums has fewer than 100 terms. Measured: 1e-6.
ROUNDING = 1e-5


def make(kind="plain", dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    return Mamba2(**{**SIZES, **KINDS[kind], **options}).to(dtype).eval()


def tokens(batch=2, length=23, dtype=torch.float32, seed=1):
    return torch.randn(batch, length, SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed)).to(dtype)


def definition(layer, x):
    """y and the last states of one unpadded batch, in the dtype of the parameters."""
    B, T = x.shape[:2]
    heads, P, G, N = layer.num_heads, layer.head_dim, layer.n_groups, layer.ssm_state_size
    z, xBC, dt = layer.in_proj(x).split([heads * P, heads * P + 2 * G * N, heads], dim=-1)
    W = layer.conv_kernel_size
    padded = F.pad(xBC, (0, 0, W - 1, 0))
    xBC = sum(layer.conv1d.weight[:, 0, i] * padded[:, i : i + T] for i in range(W))
    act = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}[layer.activation]
    xBC = act(xBC if layer.conv1d.bias is None else xBC + layer.conv1d.bias)
    v, key, query = xBC.split([heads * P, G * N, G * N], dim=-1)
    v = v.view(B, T, heads, P)
    key, query = (y.view(B, T, G, N).repeat_interleave(heads // G, dim=2) for y in (key, query))
    dt = F.softplus(dt + layer.dt_bias).clamp(*layer.dt_limit)
    S, outputs = x.new_zeros(B, heads, P, N), []
    for t in range(T):
        decay = torch.exp(-dt[:, t] * layer.A_log.exp())
        S = decay[..., None, None] * S + (dt[:, t, :, None] * v[:, t])[..., None] * key[:, t, :, None]
        outputs.append(torch.einsum("bhpn,bhn->bhp", S, query[:, t]) + layer.D.view(heads, -1) * v[:, t])
    y = torch.stack(outputs, dim=1).flatten(2)
    if layer.norm is None:
        return layer.out_proj(y * act(z)), S
    y = y if layer.norm_before_gate else y * F.silu(z)
    groups = y.unflatten(-1, (G, -1))
    y = (groups * (groups.square().mean(-1, keepdim=True) + layer.norm_eps).rsqrt()).flatten(-2) * layer.norm.weight
    return layer.out_proj(y * F.silu(z) if layer.norm_before_gate else y), S


def close(got, expected, limit=ROUNDING):
    assert got.shape == expected.shape
    assert get_err_ratio(expected.double(), got.double()) < limit


def exact(layer, x):
    return definition(pickle.loads(pickle.dumps(layer)).double(), x.double())


def test_arguments_and_parameters_of_fla():
    defaults = {
        "num_heads": None,
        "head_dim": 64,
        "hidden_size": 2048,
        "state_size": 128,
        "expand": 2,
        "n_groups": 1,
        "conv_kernel": 4,
        "conv_init": None,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "A_init_range": (1, 16),
        "D_has_hdim": False,
        "rmsnorm": True,
        "norm_before_gate": False,
        "dt_min": 0.001,
        "dt_max": 0.1,
        "dt_init_floor": 1e-4,
        "dt_limit": (0.0, float("inf")),
        "use_bias": False,
        "norm_eps": 1e-5,
        "chunk_size": 256,
        "layer_idx": None,
        "backend": "cuda",
    }
    parameters = inspect.signature(Mamba2).parameters
    assert [(name, p.default) for name, p in parameters.items()] == list(defaults.items())
    layer = Mamba2(num_heads=64)
    assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == [
        ("dt_bias", (64,)),
        ("A_log", (64,)),
        ("D", (64,)),
        ("conv1d.weight", (4352, 1, 4)),
        ("conv1d.bias", (4352,)),
        ("in_proj.weight", (8512, 2048)),
        ("norm.weight", (4096,)),
        ("out_proj.weight", (2048, 4096)),
    ]


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.half(), lambda x: pickle.loads(pickle.dumps(x))])
def test_initial_values(convert):
    layer = convert(Mamba2(hidden_size=512, head_dim=4, conv_init=0.25, A_init_range=(2, 3), dt_min=0.01, dt_max=0.02))
    assert 1.99 < layer.A_log.exp().min() < 2.1 and 2.9 < layer.A_log.exp().max() < 3.01
    dt = F.softplus(layer.dt_bias.float())
    assert 0.0099 < dt.min() < 0.0105 and 0.0195 < dt.max() < 0.0201
    assert (layer.D == 1).all()
    assert 0.24 < layer.conv1d.weight.abs().max() <= 0.25
    assert all(getattr(layer, name)._no_weight_decay for name in ("dt_bias", "A_log", "D"))


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients(kind):
    layer, x = make(kind), tokens(length=70)
    close(layer(x)[0], exact(layer, x)[0])
    layer, x = layer.double(), x.double().requires_grad_()
    leaves = [x, *layer.parameters()]
    weights = torch.randn_like(x)
    got = torch.autograd.grad((layer(x)[0] * weights).sum(), leaves)
    expected = torch.autograd.grad((definition(layer, x)[0] * weights).sum(), leaves)
    for gradient, reference in zip(got, expected, strict=True):
        close(gradient, reference, 1e-10)
        assert reference.any()


@pytest.mark.parametrize("A_log, dt_bias", [(20.0, 30.0), (-20.0, 30.0), (20.0, -30.0), (100.0, 0.0)])
def test_extreme_decays(A_log, dt_bias):
    """States that forget at once (also by decays of -inf), and states that forget nothing."""
    layer, x = make(), tokens(length=70).transpose(0, 1).contiguous().transpose(0, 1)
    with torch.no_grad():
        layer.A_log[::2] = A_log
        layer.dt_bias[1:] = dt_bias
    close(layer(x)[0], exact(layer, x)[0])
    with torch.no_grad():
        close(layer(x[:, :5])[0], exact(layer, x[:, :5])[0])


def test_bfloat16():
    layer, x = make("groups", torch.bfloat16), tokens(dtype=torch.bfloat16)
    o = layer(x)[0]
    assert o.dtype == torch.bfloat16
    # Five roundings to eight digits: of both projections, the convolution, the gate and the norm.
    close(o, exact(layer, x)[0], 5 * 2.0**-8)


@settings(max_examples=15)
@given(st.sampled_from(list(KINDS)), st.lists(st.integers(1, 80), min_size=1, max_size=4), st.integers(0, 99))
def test_prefill_in_pieces(kind, lengths, seed):
    layer, x = make(kind, seed=seed), tokens(length=sum(lengths), seed=seed)
    cache, outputs, start = Cache(), [], 0
    with torch.no_grad():
        for length in lengths:
            outputs.append(layer(x[:, start : start + length], past_key_values=cache, use_cache=True)[0])
            start += length
    o, state = exact(layer, x)
    close(torch.cat(outputs, dim=1), o)
    assert cache.get_seq_length() == x.shape[1] and cache[0]["recurrent_state"].dtype == torch.float32
    close(cache[0]["recurrent_state"], state)
    assert cache[0]["conv_state"].shape == (2, layer.conv_dim, layer.conv_kernel_size)


@pytest.mark.parametrize(
    "grad, length, expected",
    [(False, 1, "fused_recurrent"), (False, 64, "fused_recurrent"), (False, 65, "chunk"), (True, 1, "chunk")],
)
def test_op(grad, length, expected, monkeypatch):
    calls = []
    for name in ("chunk", "fused_recurrent"):
        op = getattr(mamba2, f"{name}_simple_gla")
        monkeypatch.setattr(
            mamba2, f"{name}_simple_gla", lambda *, name=name, op=op, **options: calls.append(name) or op(**options)
        )
    with torch.set_grad_enabled(grad):
        make()(tokens(length=length))
    assert calls == [expected]


@torch.no_grad()
def test_a_cache_that_is_only_read():
    layer, x, cache = make(), tokens(), Cache()
    layer(x[:, :20], past_key_values=cache, use_cache=True)
    before = {name: state.clone() for name, state in cache[0].items() if state is not None}
    o, _, returned = layer(x[:, 20:], past_key_values=cache)
    close(o, exact(layer, x)[0][:, 20:])
    assert returned is cache and cache.get_seq_length() == 20
    assert all(torch.equal(cache[0][name], state) for name, state in before.items())


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding(side):
    layer, x, cache = make("groups"), tokens(length=30), Cache()
    mask = torch.ones(2, 30, dtype=torch.long)
    rows = slice(7, 30) if side == "left" else slice(0, 23)
    mask[1] = 0
    mask[1, rows] = 1
    o = layer(x, attention_mask=mask, past_key_values=cache, use_cache=True)[0]
    assert not o[1][mask[1] == 0].any()
    whole, alone = exact(layer, x[:1]), exact(layer, x[1:, rows])
    close(o[:1], whole[0])
    close(o[1:, rows], alone[0])
    close(cache[0]["recurrent_state"], torch.cat((whole[1], alone[1])))
    close(
        layer(x[:, :1], past_key_values=cache, use_cache=True)[0][1:],
        exact(layer, torch.cat((x[1:, rows], x[1:, :1]), 1))[0][:, -1:],
    )


def test_packed_sequences():
    layer, x = make(), tokens(batch=1, length=30)
    o = layer(x, cu_seqlens=torch.tensor([0, 11, 11, 30]))[0]
    close(o, torch.cat((exact(layer, x[:, :11])[0], exact(layer, x[:, 11:])[0]), dim=1))


def test_no_tokens():
    layer = make()
    assert layer(tokens(length=0))[0].shape == (2, 0, 24)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"num_heads": 5},
            "num_heads \\* head_dim must be expand \\* hidden_size = 48, got num_heads=5 and head_dim=8",
        ),
        ({"head_dim": 9}, "got num_heads=5 and head_dim=9"),
        ({"n_groups": 4}, "num_heads=6 must be divisible by n_groups=4"),
        ({"hidden_act": "softmax"}, "hidden_act must be one of .*'silu'.*got 'softmax'"),
        ({"backend": "cpu"}, "backend must be 'cuda' or 'triton', got 'cpu'"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_refused_inputs():
    with pytest.raises(ValueError, match="Expected attention_mask as a 0-1 matrix"):
        make()(tokens(), attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="requires `layer_idx`"):
        make(layer_idx=None)(tokens(), past_key_values=Cache(), use_cache=True)
