"""Rotary embeddings against rotation by complex numbers."""

import pytest
import torch

from fla_npu.errors import ShapeError
from fla_npu.modules.rotary import RotaryEmbedding, rotary_embedding


def rotated(x, positions, dim, base=10000.0, interleaved=False):
    """The first `dim` channels of x `[T, H, D]` as complex numbers, turned by `position * base^(-2i / dim)`."""
    x = x.double()
    half = dim // 2
    real, imaginary = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleaved else (x[..., :half], x[..., half:dim])
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * base ** (-torch.arange(half).double() * 2 / dim)
    turned = torch.complex(real, imaginary) * torch.exp(1j * angle)[:, None]
    parts = turned.real, turned.imag
    head = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([head, x[..., dim:]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 4])
def test_offsets_and_packed_sequences(interleaved, dim):
    torch.manual_seed(0)
    q, k = torch.randn(2, 7, 3, 8), torch.randn(2, 7, 1, 8)
    rope = RotaryEmbedding(dim, base=100.0, interleaved=interleaved)
    got = rope(q, k)
    offset = rope(q, k, seqlen_offset=5)
    each = rope(q, k, seqlen_offset=torch.tensor([5, 2]))
    packed = rope(q[:1], k[:1], cu_seqlens=torch.tensor([0, 3, 3, 7]))
    given = rope(q, k, position_ids=torch.tensor([[4, 4, 0, 1, 2, 9, 7]]))
    for x, *results in zip((q, k), got, offset, each, packed, given, strict=True):
        for result, first, second in zip(
            results,
            (range(7), range(5, 12), range(5, 12), [0, 1, 2, 0, 1, 2, 3], [4, 4, 0, 1, 2, 9, 7]),
            (range(7), range(5, 12), range(2, 9), None, [4, 4, 0, 1, 2, 9, 7]),
            strict=True,
        ):
            for row, positions in enumerate((first, second)):
                if positions is not None:
                    expected = rotated(x[row], list(positions), dim, 100.0, interleaved)
                    torch.testing.assert_close(result[row].double(), expected, rtol=1e-5, atol=1e-5)


def test_tables():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 8)
    angle = torch.arange(9.0)[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = angle.cos(), angle.sin()
    expected = rotated(x[0], range(4, 9), 4, base=100.0)
    torch.testing.assert_close(
        rotary_embedding(x, cos, sin, seqlen_offsets=4)[0].double(), expected, rtol=1e-5, atol=1e-5
    )
    padded = rotary_embedding(x, cos, sin, seqlen_offsets=torch.tensor([-2, 0]))
    assert (padded[0, :2, :, :4] == 0).all() and torch.equal(padded[..., 4:], x[..., 4:])
    torch.testing.assert_close(padded[0, 2:].double(), rotated(x[0, 2:], range(3), 4, base=100.0), rtol=1e-5, atol=1e-5)
    y = x.clone()
    assert rotary_embedding(y, cos, sin, inplace=True) is y and torch.equal(y, rotary_embedding(x, cos, sin))
    with pytest.raises(ValueError, match="cos and sin have 9 positions, position 9 is needed"):
        rotary_embedding(x, cos, sin, seqlen_offsets=5)
    with pytest.raises(ShapeError, match=r"the offset must be an int or \[2\], got \(3,\)"):
        rotary_embedding(x, cos, sin, seqlen_offsets=torch.zeros(3, dtype=torch.long))
    with pytest.raises(ShapeError, match="cos and sin"):
        rotary_embedding(x[..., :2], cos, sin)


def test_xpos_scales_cancel_in_products():
    """Of a query and a key: what is left depends on their distance alone."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8).expand(1, 6, 1, 8), torch.randn(1, 1, 1, 8).expand(1, 6, 1, 8)
    rope = RotaryEmbedding(8, scale_base=16.0)
    (q1, k1), (q2, k2) = rope(q, k), rope(q, k, seqlen_offset=30)
    products = torch.einsum("bthd,bshd->ts", q1, k1)
    torch.testing.assert_close(products, torch.einsum("bthd,bshd->ts", q2, k2), rtol=1e-4, atol=1e-4)
    for distance in range(-5, 6):
        torch.testing.assert_close(
            products.diagonal(distance), products.diagonal(distance)[:1].expand(6 - abs(distance)), rtol=1e-4, atol=1e-4
        )
    assert products[5, 0] != products[0, 5]


def test_gradient_dtype_and_parameters():
    torch.manual_seed(0)
    rope = RotaryEmbedding(4)
    q = torch.randn(1, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q: rope(q, q)[0], (q,))
    q16, _ = rope(q.detach().to(torch.bfloat16), q.detach().to(torch.bfloat16))
    assert q16.dtype == torch.bfloat16
    # Far positions must not be rounded to 16 bits: 257 and 256 would be the same.
    far = RotaryEmbedding(4)(*[torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)] * 2, seqlen_offset=256)[0]
    near = RotaryEmbedding(4, pos_idx_in_fp32=False)(
        *[torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)] * 2, seqlen_offset=256
    )[0]
    assert not torch.equal(far[:, 0], far[:, 1]) and torch.equal(near[:, 0], near[:, 1])
    assert not list(rope.state_dict()) and "dim=4" in repr(rope)
    with pytest.raises(ShapeError, match="must be even, got 3"):
        RotaryEmbedding(3)
