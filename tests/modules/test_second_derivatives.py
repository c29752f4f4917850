"""Second derivatives of the modules: the right ones or an error, never those of a gradient taken for a constant."""

import pytest
import torch

from fla_npu.modules import blockwise, fused_cross_entropy
from fla_npu.modules import norm as norms
from fla_npu.modules.activations import ACT2FN, elu_p1, logsigmoid, powglu, sigmoidglu, sqrelu, swiglu
from fla_npu.modules.causal_conv1d import causal_conv1d
from fla_npu.modules.fused_cross_entropy import cross_entropy_loss
from fla_npu.modules.fused_kl_div import fused_kl_div_loss
from fla_npu.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla_npu.modules.l2norm import l2norm
from fla_npu.modules.l2warp import l2_warp
from fla_npu.modules.layernorm import layer_norm, rms_norm, rms_norm_linear
from fla_npu.modules.layernorm_gated import rmsnorm_fn
from fla_npu.modules.rotary import RotaryEmbedding
from fla_npu.modules.token_shift import token_shift

TARGET = torch.tensor([0, 3, -100, 2])
BOUNDS = torch.tensor([0, 2, 2, 5])

CASES = {
    **{name: (lambda x, fn=ACT2FN[name]: fn(x), [(3, 4)]) for name in ("sigmoid", "logsigmoid", "silu", "gelu")},
    "logsigmoid over temperature": (lambda x: logsigmoid(x, 2.0), [(3, 4)]),
    "sqrelu": (sqrelu, [(3, 4)]),
    "elu_p1": (elu_p1, [(3, 4)]),
    "swiglu": (swiglu, [(3, 4), (3, 4)]),
    "swiglu of one": (lambda x: swiglu(x, x), [(3, 4)]),
    "sigmoidglu": (sigmoidglu, [(3, 4), (3, 4)]),
    "powglu": (powglu, [(3, 4), (3, 4)]),
    "l2norm": (l2norm, [(3, 4)]),
    "rms_norm": (lambda x, w, r: rms_norm(x, w, None, r), [(3, 4), (4,), (3, 4)]),
    "rms_norm of a sum of one": (lambda x, w: rms_norm(x, w, None, x), [(3, 4), (4,)]),
    "rms_norm, both results": (lambda x, w, r: rms_norm(x, w, None, r, prenorm=True), [(3, 4), (4,), (3, 4)]),
    "layer_norm": (layer_norm, [(3, 4), (4,), (4,)]),
    "rms_norm_linear": (lambda x, w, m: rms_norm_linear(x, w, None, m, None), [(3, 4), (4,), (2, 4)]),
    "GroupNorm": (norms.GroupNorm(2, 4, bias=True, dtype=torch.float64), [(3, 4)]),
    "FusedRMSNormGated": (norms.FusedRMSNormGated(4, dtype=torch.float64), [(3, 4), (3, 4)]),
    "FusedLayerNormGated": (
        norms.FusedLayerNormGated(4, activation="sigmoid", dtype=torch.float64),
        [(3, 4), (3, 4)],
    ),
    "rmsnorm_fn": (
        lambda x, w, z: rmsnorm_fn(x, w, None, z, group_size=2, norm_before_gate=False),
        [(3, 4), (4,), (3, 4)],
    ),
    "convolution": (
        lambda x, w, b, r: causal_conv1d(x, w, b, r, activation="silu")[0],
        [(2, 5, 2), (2, 3), (2,), (2, 5, 2)],
    ),
    "convolution of states": (
        lambda x, w, s: causal_conv1d(x, w, None, None, s, True, "silu"),
        [(2, 4, 2), (2, 3), (2, 2, 3)],
    ),
    "convolution of packed sequences": (
        lambda x, w, s: causal_conv1d(x, w, None, x, s, True, "silu", cu_seqlens=BOUNDS),
        [(1, 5, 2), (2, 3), (3, 2, 3)],
    ),
    "convolution of a token": (lambda x, w: causal_conv1d(x, w)[0], [(2, 1, 2), (2, 4)]),
    "token_shift": (token_shift, [(2, 4, 3)]),
    "RotaryEmbedding": (lambda q, k: RotaryEmbedding(4)(q, k), [(1, 3, 2, 4), (1, 3, 1, 4)]),
    "cross entropy": (
        lambda x: cross_entropy_loss(x, TARGET, 0.1, 1.5, 0.2, 3.0)[0],
        [(4, 5)],
    ),
}
LINEAR = ("token_shift", "RotaryEmbedding")
"""Their first derivatives are constants."""


@pytest.mark.parametrize("elements", [1 << 18, 8], ids=["one block", "many blocks"])
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name, elements, monkeypatch):
    for module in (blockwise, fused_cross_entropy):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", elements)
    fn, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def outputs(*inputs):
        found = fn(*inputs)
        return found if isinstance(found, tuple) else (found,)

    # With and without a history the first gradients are the same: two ways of computing them.
    ys = outputs(*inputs)
    dys = [torch.randn_like(y) for y in ys]
    first = torch.autograd.grad(ys, inputs, dys, allow_unused=True, materialize_grads=True)
    again = torch.autograd.grad(
        outputs(*inputs), inputs, dys, create_graph=True, allow_unused=True, materialize_grads=True
    )
    for d, other in zip(first, again, strict=True):
        torch.testing.assert_close(d, other.detach(), rtol=1e-10, atol=1e-10)
    assert any(d.requires_grad for d in again) or name in LINEAR
    assert torch.autograd.gradgradcheck(outputs, inputs, fast_mode=True)


def test_rows_that_do_not_count_may_hold_infinities():
    logits = torch.randn(4, 5, dtype=torch.float64)
    logits[2] = float("inf")
    logits.requires_grad_()
    (d,) = torch.autograd.grad(cross_entropy_loss(logits, TARGET)[0].sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(d.square().sum(), logits)
    assert second.isfinite().all() and not second[2].any() and second[0].abs().sum() > 0


def losses_without():
    """Losses that allow no second derivatives, and what of."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    logits = torch.randn(1, 4, 5, requires_grad=True)
    return {
        "fused_linear_cross_entropy": (fused_linear_cross_entropy_loss(x, TARGET, weight), x, "a fused loss"),
        "fused_kl_div": (fused_kl_div_loss(x, x.detach(), weight, weight.flip(0)), x, "a fused loss"),
        "l2_warp": (l2_warp(logits.sum(), logits), logits, "l2_warp"),
    }


@pytest.mark.parametrize("name", list(losses_without()))
def test_an_error_where_there_are_none(name):
    """Also where the loss itself gets no gradient with a history, and where a term beside it has second derivatives."""
    loss, x, what = losses_without()[name]
    (d,) = torch.autograd.grad(loss, x, create_graph=True)
    plain, x_again, _ = losses_without()[name]
    (want,) = torch.autograd.grad(plain, x_again)
    assert torch.equal(d.detach(), want) and not want.requires_grad
    with pytest.raises(RuntimeError, match=f"{what}.* has no second derivatives"):
        (d.square().sum() + x.square().sum()).backward()
