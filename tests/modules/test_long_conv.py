"""Long convolutions against sums over all pairs of tokens in fp64, their gradients and their parameters."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu.errors import ShapeError
from fla_npu.modules import ImplicitLongConvolution, LongConvolution
from fla_npu.modules.long_conv import fft_conv


def definition(u, k, dropout_mask=None, gelu=True, k_rev=None):
    """In fp64, tap by tap; k and k_rev broadcast against `u[..., t]`."""
    u, y, L = u.double(), u.double().clone(), u.shape[-1]
    for t in range(L):
        for j in range(L):
            if j < k.shape[-1] and j <= t:
                y[..., t] += k.double()[..., j] * u[..., t - j]
            if k_rev is not None and j < k_rev.shape[-1] and t + j < L:
                y[..., t] += k_rev.double()[..., j] * u[..., t + j]
    y = F.gelu(y) if gelu else y
    return y if dropout_mask is None else y * dropout_mask.double()[..., None]


# The last bit of the dtype, times the growth of a sum of up to 20 terms in an FFT of up to 20 points.
LIMIT = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 10),
    taps=st.integers(1, 25),
    dtype=st.sampled_from(list(LIMIT)),
    filter_dtype=st.sampled_from([torch.float32, torch.float64]),
    gelu=st.booleans(),
    reverse=st.booleans(),
    dropout=st.booleans(),
    rows=st.sampled_from([(), (1,), (2,)]),
)
def test_matches_the_definition(length, taps, dtype, filter_dtype, gelu, reverse, dropout, rows):
    """Also where the filter is longer than the sequence, which FLA gets wrong, or than twice the sequence."""
    u = torch.randn(length, 3, 2).permute(2, 1, 0).to(dtype)
    k = torch.randn(*rows, 3, taps, dtype=filter_dtype)
    k_rev = torch.randn(3, taps + 1) if reverse else None
    mask = torch.randint(2, (2, 3)).to(dtype) if dropout else None
    y = fft_conv(u, k, mask, gelu, k_rev)
    want = definition(u, k, mask, gelu, k_rev)
    assert y.dtype == dtype and y.shape == u.shape
    scale = max(1.0, want.abs().max().item()) if length else 1.0
    torch.testing.assert_close(y.double(), want, rtol=0, atol=scale * LIMIT[dtype])


def test_four_dimensions():
    u, k = torch.randn(2, 3, 4, 6), torch.randn(3, 6)
    want = torch.stack([fft_conv(u[:, :, v], k, None) for v in range(4)], dim=2)
    torch.testing.assert_close(fft_conv(u, k, None), want, rtol=1e-5, atol=1e-5)


def test_gradients():
    u = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    k, k_rev = (torch.randn(2, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def fn(u, k, k_rev):
        return fft_conv(u, k, None, True, k_rev)

    assert torch.autograd.gradcheck(fn, (u, k, k_rev))
    assert torch.autograd.gradgradcheck(fn, (u, k, k_rev))


@pytest.mark.parametrize("length", [0, 1, 5, 12, 20])
def test_modules(length):
    torch.manual_seed(0)
    x = torch.randn(2, length, 4)
    conv = LongConvolution(4, 12)
    assert {n: tuple(p.shape) for n, p in conv.named_parameters()} == {"filter": (4, 12)}
    want = definition(x.mT, conv.filter.detach(), gelu=False).mT
    torch.testing.assert_close(conv(x).double(), want, rtol=1e-5, atol=1e-5)

    implicit = ImplicitLongConvolution(4, 12, d_emb=5, d_hidden=6)
    shapes = {n: tuple(p.shape) for n, p in implicit.state_dict().items()}
    assert shapes == {
        "pos_emb.z": (1, 12, 5),
        "mlp.0.weight": (6, 5),
        "mlp.0.bias": (6,),
        "mlp.2.weight": (4, 6),
        "mlp.2.bias": (4,),
    }
    assert not implicit.pos_emb.z.requires_grad
    taps = implicit.filter(length)
    assert taps.shape == (1, 4, min(length, 12))
    want = definition(x.mT, taps.detach(), gelu=False).mT
    torch.testing.assert_close(implicit(x).double(), want, rtol=1e-5, atol=1e-5)
    implicit(x).sum().backward()
    assert all(p.grad is not None for n, p in implicit.named_parameters() if n != "pos_emb.z")


def test_positional_embedding():
    """Time, cosines and sines of waves of 1e-4 to bands - 1 turns, as Hyena has them."""
    z = ImplicitLongConvolution(4, 10, d_emb=7).pos_emb.z.double()[0]
    t, turns = torch.arange(10, dtype=torch.float64), torch.tensor([1e-4, 1.00005, 2.0], dtype=torch.float64)
    wave = torch.exp(-1j * turns * (2 * torch.pi * t / 10)[:, None])
    want = torch.cat([t[:, None] / 9, wave.real, wave.imag], 1)
    torch.testing.assert_close(z, want, rtol=0, atol=1e-5)


def test_refuses():
    for u, k in (
        ((2, 3, 4), (4, 4)),
        ((2, 3, 4), (3,)),
        ((2, 3, 4), (3, 3, 4)),
        ((3, 4), (3, 4)),
        ((2, 3, 4, 5), (1, 3, 4)),
    ):
        with pytest.raises(ShapeError, match=r"k \[D, L'\], got"):
            fft_conv(torch.zeros(u), torch.zeros(k), None)
    with pytest.raises(ShapeError, match=r"k_rev \[D, L'\]"):
        fft_conv(torch.zeros(2, 3, 4), torch.zeros(3, 4), None, k_rev=torch.zeros(2, 4))
    with pytest.raises(ShapeError, match=r"dropout_mask must be \[B, D\]"):
        fft_conv(torch.zeros(2, 3, 4), torch.zeros(3, 4), torch.ones(3))
    with pytest.raises(ShapeError, match=r"d_emb \(emb_dim\) must be odd and at least 3"):
        ImplicitLongConvolution(4, 8, d_emb=4)
    with pytest.raises(ShapeError, match=r"x must be \[B, T, D\] with D=4"):
        LongConvolution(4, 8)(torch.zeros(1, 3, 5))
    with pytest.raises(NotImplementedError, match="cu_seqlens"):
        LongConvolution(4, 8)(torch.zeros(1, 3, 4), cu_seqlens=torch.tensor([0, 3]))
