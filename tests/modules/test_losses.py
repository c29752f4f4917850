"""The cross entropies and the KL divergence against PyTorch's, and that all logits never exist at once."""

import pytest
import torch
import torch.nn.functional as F

from fla_npu.errors import ShapeError
from fla_npu.modules import (
    FusedCrossEntropyLoss,
    FusedKLDivLoss,
    FusedLinearCrossEntropyLoss,
    fused_cross_entropy,
    fused_linear_cross_entropy,
)
from fla_npu.modules.fused_cross_entropy import cross_entropy_loss
from fla_npu.modules.fused_kl_div import fused_kl_div_loss
from fla_npu.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla_npu.modules.l2warp import l2_warp
from fla_npu.utils import get_err_ratio

N, D, V = 13, 6, 11


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks for every call, the last one short."""
    monkeypatch.setattr(fused_cross_entropy, "BLOCK_ELEMENTS", 4 * V)
    monkeypatch.setattr(fused_linear_cross_entropy, "MIN_BLOCK_ROWS", 4)


def inputs(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    target = torch.randint(V, (N,))
    target[[2, 5]] = -100
    x, weight, bias = (torch.randn(*size, dtype=dtype) for size in ((N, D), (V, D), (V,)))
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), target


def definition(logits, target, scale=1.0, cap=None, smoothing=0.0, square=0.0, reduction="mean"):
    z = logits * scale
    z = z if cap is None else cap * torch.tanh(z / cap)
    counts = target != -100
    losses = F.cross_entropy(z, target, reduction="none", label_smoothing=smoothing)
    losses = losses + torch.where(counts, square * z.logsumexp(-1).square(), 0.0)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counts.sum()}[reduction]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.5, "cap": 2.0},
        {"smoothing": 0.2, "square": 0.3},
        {"scale": 2.0, "cap": 1.5, "smoothing": 0.1, "square": 0.1},
    ],
    ids=lambda o: " ".join(o) or "plain",
)
def test_cross_entropy(options, reduction):
    logits = (3 * torch.randn(N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).requires_grad_()
    target = inputs()[3]
    module = FusedCrossEntropyLoss(
        reduction=reduction,
        label_smoothing=options.get("smoothing", 0.0),
        logit_scale=options.get("scale", 1.0),
        logit_softcapping=options.get("cap"),
        lse_square_scale=options.get("square", 0.0),
        return_z_loss=True,
    )
    loss, z_loss = module(logits, target)
    expected = definition(logits, target, reduction=reduction, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert not z_loss.requires_grad and z_loss.shape == loss.shape
    weights = torch.randn_like(loss)
    (got,), (wanted,) = (torch.autograd.grad((y * weights).sum(), logits) for y in (loss, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert (got[[2, 5]] == 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": 2.0, "cap": 1.5, "smoothing": 0.1}], ids=["plain", "all options"])
def test_linear_cross_entropy(options, with_bias, reduction):
    x, weight, bias, target = inputs()
    bias = bias if with_bias else None
    leaves = (x, weight) if bias is None else (x, weight, bias)
    loss = FusedLinearCrossEntropyLoss(
        label_smoothing=options.get("smoothing", 0.0),
        logit_scale=options.get("scale", 1.0),
        logit_softcapping=options.get("cap"),
        reduction=reduction,
    )(x[None], target[None], weight, bias)
    expected = definition(F.linear(x, weight, bias), target, reduction=reduction, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(3 * expected, leaves), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_l2_penalty_is_in_the_gradient_only():
    """As half the penalty factor times the mean square of the largest logits would be."""
    x, weight, _, target = inputs()
    logits = F.linear(x, weight)
    plain = F.cross_entropy(logits, target)
    penalised = plain + 0.05 / 2 * logits.max(-1).values.square().mean()
    fused = fused_linear_cross_entropy_loss(x, target, weight, use_l2warp=True, l2_penalty_factor=0.05)
    wrapped = l2_warp(F.cross_entropy(logits, target), logits[None], 0.05)
    expected = torch.autograd.grad(2 * penalised, (x, weight), retain_graph=True)
    for loss in (fused, wrapped):
        torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-12)
        for got, wanted in zip(torch.autograd.grad(2 * loss, (x, weight)), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_kl_divergence():
    x, weight, *_ = inputs()
    teacher_x, teacher_weight = torch.randn(N, 4, dtype=torch.float64), torch.randn(V, 4, dtype=torch.float64)
    loss = FusedKLDivLoss()(x, teacher_x, weight, teacher_weight)
    student, teacher = F.linear(x, weight).log_softmax(-1), F.linear(teacher_x, teacher_weight).log_softmax(-1)
    expected = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight)), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="the teacher gets no gradients"):
        fused_kl_div_loss(x, teacher_x, weight, teacher_weight.requires_grad_())


def test_all_logits_never_exist(monkeypatch):
    """No projection has more than an eighth of the rows, nor more logits than a block may have."""
    rows, linear = [], F.linear

    def recording(x, *args):
        rows.append(len(x))
        return linear(x, *args)

    monkeypatch.setattr(fused_linear_cross_entropy.F, "linear", recording)
    x, weight, _, target = inputs()
    fused_linear_cross_entropy_loss(x.repeat(8, 1), target.repeat(8), weight)
    assert max(rows) == N and sum(rows) == 8 * N
    rows.clear()
    monkeypatch.setattr(fused_linear_cross_entropy, "BLOCK_LOGITS", 5 * V)
    fused_linear_cross_entropy_loss(x.repeat(8, 1), target.repeat(8), weight)
    assert max(rows) == 5


@pytest.mark.parametrize("fused", [False, True])
def test_low_precision(fused):
    """Losses of 16-bit logits are fp32, with the error of the logits' rounding; gradients are rounded once more."""
    x, weight, _, target = inputs(torch.bfloat16)
    if fused:
        loss = fused_linear_cross_entropy_loss(x, target, weight)
    else:
        loss = FusedCrossEntropyLoss(inplace_backward=True)(F.linear(x, weight), target)
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = F.cross_entropy(F.linear(x64, weight64), target)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=2**-8)
    got, wanted = torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x64, weight64))
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.bfloat16 and get_err_ratio(b, a.double()) < 2**-6


def test_autocast():
    x, weight, _, target = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy_loss(x, target, weight)
        expected = F.cross_entropy(F.linear(x, weight).float(), target)
    torch.testing.assert_close(loss, expected)
    for got, wanted in zip(
        torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight)), strict=True
    ):
        assert got.dtype == torch.float32 and get_err_ratio(wanted, got) < 2**-6


@pytest.mark.parametrize("kind", ["cross entropy", "KL divergence"])
def test_scales_of_fp16_training(kind):
    """`GradScaler` starts with 2^16, which is no fp16 number."""
    x, weight, _, target = inputs(torch.float16)
    if kind == "cross entropy":
        loss = fused_linear_cross_entropy_loss(x, target, weight)
    else:
        loss = fused_kl_div_loss(x, x.detach().flip(0), weight, weight.detach())
    small = torch.autograd.grad(loss * 2**10, (x, weight), retain_graph=True)
    for a, b in zip(torch.autograd.grad(loss * 2**16, (x, weight)), small, strict=True):
        assert a.isfinite().all() and torch.equal(a, 2**6 * b)


def test_logits_whose_square_overflows():
    logits = torch.tensor([[1e30, 0.0, -1e30], [-1e30, -1e30, 0.0]], requires_grad=True)
    loss, z_loss = cross_entropy_loss(logits, torch.tensor([0, 0]))
    assert loss.tolist() == F.cross_entropy(logits, torch.tensor([0, 0]), reduction="none").tolist()
    assert z_loss.tolist() == [0, 0]
    assert torch.autograd.grad(loss.sum(), logits)[0].tolist() == [[0, 0, 0], [-1, 0, 1]]


def test_nothing_counts_and_nothing_is_there():
    x, weight, _, target = inputs()
    ignored = torch.full_like(target, -100)
    assert fused_linear_cross_entropy_loss(x, ignored, weight).item() == 0
    assert FusedCrossEntropyLoss()(F.linear(x, weight), ignored).isnan()
    huge = torch.full((N, V), torch.inf, dtype=torch.float64).requires_grad_()
    loss, _ = cross_entropy_loss(huge, ignored)
    assert (torch.autograd.grad(loss.sum(), huge)[0] == 0).all()
    assert cross_entropy_loss(torch.zeros(0, V), target[:0])[0].shape == (0,)
    with torch.no_grad():
        assert fused_linear_cross_entropy_loss(x[:0], target[:0], weight).item() == 0


def test_refusals():
    x, weight, bias, target = inputs()
    with pytest.raises(ShapeError, match=r"logits must be \[N, V\] and target \[N\], got \(13, 6\) and \(12,\)"):
        cross_entropy_loss(x, target[:-1])
    with pytest.raises(ShapeError, match=r"x must be \[N, D\], target \[N\] and weight \[V, D\]"):
        fused_linear_cross_entropy_loss(x, target, weight[:, :3])
    with pytest.raises(ShapeError, match=r"bias must be \[11\], got \(3,\)"):
        fused_linear_cross_entropy_loss(x, target, weight, bias[:3])
    with pytest.raises(ValueError, match="reduction: 'none' is not supported"):
        FusedLinearCrossEntropyLoss(reduction="none")
    with pytest.raises(NotImplementedError, match="Unsupported reduction: 'max'"):
        FusedCrossEntropyLoss(reduction="max")
    with pytest.raises(NotImplementedError, match="pass process_group=None"):
        FusedCrossEntropyLoss(process_group=object())
    with pytest.raises(ValueError, match="reduction: 'sum' is not supported"):
        FusedKLDivLoss("sum")
    for loss in (lambda t: cross_entropy_loss(x, t), lambda t: fused_linear_cross_entropy_loss(x, t, weight)):
        with pytest.raises(TypeError, match="target must hold integers, got"):
            loss(target.double())
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy_loss(x, torch.full_like(target, D))
