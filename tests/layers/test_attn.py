"""Softmax attention against its definition in fp64, with masks, windows, packed sequences and a cache."""

import pytest
import torch

from fla_npu.errors import ShapeError
from fla_npu.layers import attn
from fla_npu.layers.attn import Attention
from fla_npu.models.utils import Cache
from fla_npu.utils import get_err_ratio

ROUNDING = 2e-6
"""Of the root mean square, fp32; measured: up to 4e-7."""


def make(**options):
    torch.manual_seed(0)
    return Attention(hidden_size=32, num_heads=4, layer_idx=0, **options).eval()


def definition(layer, x):
    """One sequence x `[T, 32]`, head by head and query by query in fp64."""
    T, D = len(x), layer.head_dim

    def project(proj, norm):
        y = x.double() @ proj.weight.double().T
        y = (y if proj.bias is None else y + proj.bias.double()).view(T, -1, D)
        if norm is not None:
            y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
        return y

    def turn(y):
        angle = torch.arange(T)[:, None].double() * layer.rope_theta ** (-torch.arange(0, D, 2).double() / D)
        turned = torch.complex(y[..., : D // 2], y[..., D // 2 :]) * torch.exp(1j * angle)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    q = turn(project(layer.q_proj, getattr(layer, "q_norm", None)))
    k = turn(project(layer.k_proj, getattr(layer, "k_norm", None)))
    v = project(layer.v_proj, None)
    o = torch.zeros(T, layer.num_heads, D, dtype=torch.float64)
    for h in range(layer.num_heads):
        for t in range(T):
            seen = slice(max(0, t + 1 - (layer.window_size or T)), t + 1)
            keys, values = (y[seen, h // layer.num_kv_groups] for y in (k, v))
            o[t, h] = (keys @ q[t, h] / D**0.5).softmax(0) @ values
    return o.flatten(1) @ layer.o_proj.weight.double().T


KINDS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "qkv_bias": True},
    "normed": {"num_kv_heads": 1, "qk_norm": True, "rope_theta": 100.0},
    "window": {"num_kv_heads": 2, "window_size": 3},
}


@pytest.fixture(params=KINDS)
def layer(request, monkeypatch):
    monkeypatch.setattr(attn, "WINDOW_ROWS", 4)
    layer = make(**KINDS[request.param])
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.normal_()
    return layer


def close(got, expected):
    assert get_err_ratio(expected, got.double()) < ROUNDING


def test_one_pass_and_pieces(layer):
    x = torch.randn(2, 14, 32)
    with torch.no_grad():
        expected = torch.stack([definition(layer, row) for row in x])
        got, weights, cache = layer(x)
        close(got, expected)
        assert weights is None and cache is None
        for sizes in ([14], [5, 9], [1] * 14, [6, 1, 7]):
            cache = Cache()
            close(
                torch.cat([layer(piece, past_key_values=cache, use_cache=True)[0] for piece in x.split(sizes, 1)], 1),
                expected,
            )
            assert cache.get_seq_length() == 14
            assert cache[0]["attn_state"][0].shape == (2, min(14, layer.window_size or 14), layer.kv_dim)


def test_gradients(layer):
    layer = layer.double()
    x = torch.randn(1, 6, 32, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(layer(x)[0][0], definition(layer, x[0]), rtol=1e-5, atol=1e-6)
    got, expected = (torch.autograd.grad(y.square().sum(), x)[0] for y in (layer(x)[0], definition(layer, x[0])))
    assert get_err_ratio(expected, got) < 1e-6


def test_padding(layer):
    x, mask = torch.randn(3, 12, 32), torch.ones(3, 12, dtype=torch.bool)
    mask[0, :4] = mask[1, 9:] = mask[2, :] = False
    expected = torch.zeros(3, 12, 32, dtype=torch.float64)
    with torch.no_grad():
        for i in range(3):
            expected[i, mask[i]] = definition(layer, x[i, mask[i]]) if mask[i].any() else 0.0
        got = layer(x, attention_mask=mask)[0]
        close(got, expected)
        assert (got[~mask] == 0).all()
        cache, parts = Cache(), []
        for start, end in ((0, 2), (2, 9), (9, 10), (10, 12)):
            parts.append(layer(x[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)[0])
        close(torch.cat(parts, 1), expected)


def test_packed(layer):
    x, bounds = torch.randn(1, 12, 32), [0, 5, 5, 6, 12]
    with torch.no_grad():
        got = layer(x, cu_seqlens=torch.tensor(bounds), attention_mask=torch.zeros(1, 12))[0][0]
        for start, end in ((0, 5), (5, 6), (6, 12)):
            close(got[start:end], definition(layer, x[0, start:end]))
        cache = Cache()
        layer(x, past_key_values=cache, use_cache=True)
    with pytest.raises(ShapeError, match="cu_seqlens cannot continue the 12 tokens in past_key_values"):
        layer(x, past_key_values=cache, cu_seqlens=torch.tensor(bounds))


def test_cache_is_only_read_without_use_cache(layer):
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        _, _, cache = layer(x[:, :6], past_key_values=Cache(), use_cache=True)
        before = [s.clone() for s in cache[0]["attn_state"]]
        close(layer(x[:, 6:], past_key_values=cache)[0][0], definition(layer, x[0])[6:])
    assert cache.get_seq_length() == 6
    assert all(torch.equal(a, b) for a, b in zip(before, cache[0]["attn_state"], strict=True))


def test_parameters_and_refusals():
    layer = make(num_kv_heads=2, qkv_bias=True, qk_norm=True)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "q_proj.weight": (32, 32), "q_proj.bias": (32,), "k_proj.weight": (16, 32), "k_proj.bias": (16,),
        "v_proj.weight": (16, 32), "v_proj.bias": (16,), "o_proj.weight": (32, 32),
        "q_norm.weight": (8,), "k_norm.weight": (8,),
    }  # fmt: skip
    for sizes in ({"num_kv_heads": 3}, {"hidden_size": 30}):
        with pytest.raises(ShapeError, match="hidden_size must be a multiple of num_heads"):
            Attention(**{"hidden_size": 32, "num_heads": 4, **sizes})
    with pytest.raises(ShapeError, match="seq_len of at least 5, got"):
        layer(torch.zeros(2, 5, 32), attention_mask=torch.ones(2, 4))
    layer.layer_idx = None
    with pytest.raises(ValueError, match="requires `layer_idx`"):
        layer(torch.zeros(1, 2, 32), past_key_values=Cache())
