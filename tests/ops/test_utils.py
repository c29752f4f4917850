"""Sequence utilities, the `fla.utils` helpers and the shared test inputs against plain loops."""

import importlib
import logging
import math
import subprocess
import sys
import warnings
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla_npu import testing, utils
from fla_npu.errors import ShapeError
from fla_npu.ops import checks
from fla_npu.ops.utils import (
    chunk_global_cumsum,
    chunk_global_cumsum_scalar,
    chunk_global_cumsum_vector,
    chunk_local_cumsum,
    chunk_local_cumsum_scalar,
    chunk_local_cumsum_vector,
    get_max_num_splits,
    pack_sequence,
    prepare_chunk_indices,
    prepare_chunk_indices_static,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_lens,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
    sinkhorn,
    softplus,
    solve_tril,
    unpack_sequence,
)
from fla_npu.ops.utils.constant import RCP_LN2
from fla_npu.ops.utils.softplus import softplus2

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5)
padding_sides = pytest.mark.parametrize("side", ["left", "right"])


def bounds_of(lens: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lens], dtype=dtype).cumsum(0, dtype=dtype)


# --- index ---


@settings(max_examples=50, deadline=None)
@given(lens=lengths, chunk_size=st.integers(1, 4), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_indices(lens: list[int], chunk_size: int, dtype: torch.dtype):
    cu = bounds_of(lens, dtype)
    chunks = [-(-length // chunk_size) for length in lens]
    tokens = [[n, t] for n, length in enumerate(lens) for t in range(length)]
    pairs = [[n, c] for n, count in enumerate(chunks) for c in range(count)]

    assert prepare_lens(cu).tolist() == lens
    for host in (None, cu.clone()):
        got = prepare_token_indices(cu, host)
        assert got.dtype == dtype and got.tolist() == tokens and got.shape == (sum(lens), 2)
        assert prepare_position_ids(cu, host).tolist() == [t for _, t in tokens]
        assert prepare_sequence_ids(cu, host).tolist() == [n for n, _ in tokens]
        got = prepare_chunk_indices(cu, chunk_size, host)
        assert got.dtype == dtype and got.tolist() == pairs and got.shape == (sum(chunks), 2)
        assert get_max_num_splits(cu, chunk_size, host) == max(chunks)
    offsets = [sum(chunks[:n]) for n in range(len(lens) + 1)]
    assert prepare_chunk_offsets(cu, chunk_size).tolist() == offsets

    static, static_offsets = prepare_chunk_indices_static(cu, chunk_size, len(pairs) + 3)
    assert static.tolist() == [*pairs, *[[-1, 0]] * 3] and static_offsets.tolist() == offsets
    assert static.dtype == static_offsets.dtype == dtype


def test_lengths_from_masks():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]]).bool()
    assert prepare_lens_from_mask(mask).tolist() == [2, 0, 2]
    assert prepare_lens_from_mask(mask).dtype == torch.int32
    assert prepare_cu_seqlens_from_mask(mask).tolist() == [0, 2, 2, 4]
    got = prepare_cu_seqlens_from_lens(torch.tensor([3, 1]), dtype=torch.int64)
    assert got.dtype == torch.int64 and got.tolist() == [0, 3, 4]


# --- cumulative sums ---


@settings(max_examples=40, deadline=None)
@given(lens=lengths, chunk_size=st.integers(1, 5), reverse=st.booleans(), inner=st.sampled_from([(2,), (2, 3)]))
def test_cumsums(lens: list[int], chunk_size: int, reverse: bool, inner: tuple[int, ...]):
    cu = bounds_of(lens)
    x = torch.randn(1, sum(lens), *inner, dtype=torch.float64)

    def one(part: torch.Tensor) -> torch.Tensor:
        return torch.stack([part[t:].sum(0) if reverse else part[: t + 1].sum(0) for t in range(len(part))])

    def expect(size: int) -> torch.Tensor:
        y = torch.zeros_like(x)
        for a, b in pairwise(cu.tolist()):
            for start in range(a, b, size):
                rows = slice(start, min(start + size, b))
                y[0, rows] = 0.5 * one(x[0, rows])
        return y

    options: dict[str, Any] = {"reverse": reverse, "scale": 0.5, "cu_seqlens": cu, "output_dtype": None}
    torch.testing.assert_close(chunk_local_cumsum(x, chunk_size, **options), expect(chunk_size))
    torch.testing.assert_close(chunk_global_cumsum(x, **options), expect(sum(lens) + 1))


@pytest.mark.parametrize("cumsum", [lambda x, **o: chunk_local_cumsum(x, 4, **o), chunk_global_cumsum])
def test_cumsum_of_a_batch(cumsum: Any):
    x = torch.randn(3, 10, 2).bfloat16().requires_grad_()
    y = cumsum(x)
    assert y.dtype == torch.float32 and cumsum(x, output_dtype=None).dtype == torch.bfloat16
    rows = torch.cat([cumsum(row, cu_seqlens=torch.tensor([0, 10])) for row in x.split(1)])
    assert torch.equal(y, rows)
    y[:, -1].sum().backward()
    assert x.grad.abs().sum() > 0
    with pytest.raises(DeprecationWarning, match="head_first"):
        cumsum(x, head_first=False)
    with pytest.raises(ValueError, match="Unsupported input shape"):
        cumsum(x[0])
    with pytest.raises(AssertionError, match="Only batch size 1"):
        cumsum(x, cu_seqlens=torch.tensor([0, 10]))


# --- packing ---


@padding_sides
@settings(max_examples=30, deadline=None)
@given(lens=lengths, extra=st.integers(0, 2))
def test_packing_is_the_inverse_of_unpacking(side: str, lens: list[int], extra: int):
    cu, size = bounds_of(lens), max(lens) + extra
    x = torch.randn(sum(lens), 2, 3)
    padded = unpack_sequence(x, cu, side, (len(lens), size, 2, 3) if extra else None)
    assert padded.shape == (len(lens), size, 2, 3)
    for n, (a, b) in enumerate(pairwise(cu.tolist())):
        row = padded[n].flip(0) if side == "left" else padded[n]
        assert torch.equal(row[: b - a], x[a:b].flip(0) if side == "left" else x[a:b])
        assert not row[b - a :].any()
    assert torch.equal(pack_sequence(padded, cu, side), x)


@padding_sides
def test_packing_has_gradients(side: str):
    cu = bounds_of([2, 0, 3])
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpack_sequence(x, cu, side), x)
    padded = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pack_sequence(x, cu, side), padded)


def test_packing_refuses():
    cu, x = bounds_of([2, 3]), torch.randn(5, 2)
    for call, message in (
        (lambda: unpack_sequence(x, cu, "middle"), "padding_side must be 'left' or 'right'"),
        (lambda: unpack_sequence(x, cu, "left", (2, 2, 2)), "S >= 3"),
        (lambda: unpack_sequence(x, cu, "left", (3, 3, 2)), "desired_shape must be"),
        (lambda: pack_sequence(torch.randn(2, 2), cu), "S >= 3"),
        (lambda: pack_sequence(torch.randn(3, 3), cu), "N=2"),
    ):
        with pytest.raises(ShapeError, match=message):
            call()


# --- triangular inverses ---


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("bounds", [None, (0, 40, 40, 75)])
def test_solve_tril(size: int, bounds: tuple[int, ...] | None):
    A = 0.3 * torch.randn(1 if bounds else 2, 75, 3, size, dtype=torch.float64)
    inverse = solve_tril(A, None if bounds is None else torch.tensor(bounds), output_dtype=None)
    assert inverse.shape == A.shape and inverse.dtype == torch.float64
    for a, b in pairwise(bounds or (0, 75)):
        for start in range(a, b, size):
            rows = slice(start, min(start + size, b))
            count = rows.stop - start
            unit = torch.eye(count, dtype=torch.float64)
            matrix = unit + A[:, rows].transpose(1, 2)[..., :count].tril(-1)
            found = inverse[:, rows].transpose(1, 2)
            torch.testing.assert_close(matrix @ found[..., :count], unit.expand_as(matrix))
            assert not found[..., count:].any()
    assert solve_tril(A.bfloat16()[:1], output_dtype=torch.float).dtype == torch.float32


def test_solve_tril_refuses():
    with pytest.raises(ShapeError, match=r"A must have shape \[B, T, H, C\]"):
        solve_tril(torch.zeros(2, 16, 16))
    with pytest.raises(AssertionError, match="Only batch size 1"):
        solve_tril(torch.zeros(2, 16, 1, 16), torch.tensor([0, 16]))


# --- softplus and Sinkhorn ---


@pytest.mark.parametrize(("fn", "base"), [(softplus, math.e), (softplus2, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus(fn: Any, base: float, dtype: torch.dtype):
    x = torch.cat([torch.linspace(-60, 60, 1001), torch.tensor([15.0, 20.0, 28.9, 1e30])]).to(dtype)
    wide = x.double()
    # log(1 + b^x) for x < 0 and x + log(1 + b^-x) above, without an overflow; log1p keeps the small ones.
    small = torch.log1p(base ** -wide.abs()) / math.log(base)
    got = fn(x)
    assert got.dtype == dtype
    # The exponent of up to 60 is rounded to half a unit; from the threshold on x itself is off by at most exp(-20).
    limit = max(64 * torch.finfo(dtype).eps, math.exp(-20))
    torch.testing.assert_close(got.double(), wide.clamp(min=0) + small, rtol=limit, atol=0)


def test_softplus_has_gradients():
    x = torch.linspace(-5, 24, 7, dtype=torch.float64, requires_grad=True)
    for fn in (softplus, softplus2):
        assert torch.autograd.gradcheck(fn, x)


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 9),
    num_iters=st.integers(1, 6),
    strength=st.sampled_from([0.1, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_sinkhorn(size: int, num_iters: int, strength: float, dtype: torch.dtype):
    logits = (strength * torch.randn(2, 3, size, size)).to(dtype).transpose(0, 1)
    want = (logits.double() - logits.double().amax((-2, -1), keepdim=True)).exp()
    for _ in range(num_iters):
        want = want / want.sum(-2, keepdim=True)
        want = want / want.sum(-1, keepdim=True)
    got = sinkhorn(logits, num_iters)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert got.dtype == wide and got.shape == logits.shape
    # A logit of 100 is rounded by 4e-6, and so is each of the logarithms that are taken off one after the other.
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 * num_iters if wide == torch.float32 else 1e-12)
    torch.testing.assert_close(got.sum(-1), torch.ones(3, 2, size, dtype=wide), rtol=0, atol=1e-5)


def test_sinkhorn_has_gradients_of_any_order():
    logits = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 4), logits)
    assert torch.autograd.gradgradcheck(lambda x: sinkhorn(x, 4), logits)
    assert sinkhorn(torch.zeros(0, 4, 4)).shape == (0, 4, 4)


def test_sinkhorn_of_entries_that_are_zero():
    logits = torch.tensor([[0.0, float("-inf")], [1.0, 2.0]], requires_grad=True)
    y = sinkhorn(logits, 50)
    y[0, 0].backward()
    assert y[0, 1] == 0 and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("logits", "num_iters", "message"),
    [
        (torch.zeros(2, 2).long(), 1, "floating dtype, got torch.int64"),
        (torch.zeros(2, 3), 1, r"\[..., N, N\] with N >= 1, got \[2, 3\]"),
        (torch.zeros(3), 1, "N >= 1"),
        (torch.zeros(0, 0), 1, "N >= 1"),
        (torch.zeros(2, 2), 0, "positive integer, got 0"),
        (torch.zeros(2, 2), True, "positive integer, got True"),
        (torch.zeros(2, 2), 1.5, "positive integer, got 1.5"),
    ],
)
def test_sinkhorn_refuses(logits: torch.Tensor, num_iters: Any, message: str):
    with pytest.raises(ValueError, match=message):
        sinkhorn(logits, num_iters)


def test_cumsums_have_names_for_scalars_and_vectors():
    assert chunk_local_cumsum_scalar is chunk_local_cumsum_vector is chunk_local_cumsum
    assert chunk_global_cumsum_scalar is chunk_global_cumsum_vector is chunk_global_cumsum


def test_constant():
    assert torch.tensor(RCP_LN2) == 1 / torch.tensor(2.0, dtype=torch.float64).log().float()


# --- fla.utils ---


def test_assert_close():
    x = torch.randn(100)
    utils.assert_close("same", x, x.clone(), 0.0)
    utils.assert_close("within err_atol", x, x + 9e-7, 0.0)
    utils.assert_close("ratio", x, 1.001 * x, 0.002)
    with pytest.raises(AssertionError, match=r"wrong diff: .* ratio: 0.01"):
        utils.assert_close("wrong", x, 1.01 * x, 0.002)
    with pytest.raises(AssertionError, match="NaN detected in tri"):
        utils.assert_close("nan", x, x / 0 * 0, 10.0)
    with pytest.raises(AssertionError, match="shapes differ"):
        utils.assert_close("shape", x, x[:1], 10.0)
    with pytest.warns(UserWarning, match="lenient"):
        utils.assert_close("lenient", x, 2 * x, 0.1, warning=True)
    utils.assert_close("empty", x[:0], x[:0], 0.0)


def test_assert_close_listens_to_no_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLA_CI_ENV", "1")
    monkeypatch.setenv("FLA_NPU_CI_ENV", "1")
    x = torch.randn(100)
    with pytest.raises(AssertionError):
        importlib.reload(utils).assert_close("wrong", x, 1.005 * x, 0.002)


def test_assert_close_logs(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="fla_npu.utils"):
        utils.assert_close("o", torch.ones(2), torch.ones(2), 0.1)
    assert "o diff: 0.000000" in caplog.text


def test_devices_are_not_looked_at_on_import():
    code = "import torch; torch.cuda.is_available = None; import fla_npu.utils"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_device_names():
    assert utils.device == utils.device_name
    assert utils.device_torch_lib is getattr(torch, utils.device)
    assert [utils.IS_NPU, utils.IS_NVIDIA, utils.IS_AMD, utils.IS_INTEL].count(True) == (utils.device != "cpu")
    assert utils.get_available_device() == utils.device_platform
    assert utils.map_triton_backend_to_torch_device() == utils.device
    with pytest.raises(AttributeError, match="has no attribute 'IS_NPV'"):
        _ = utils.IS_NPV


class Machine:
    """PyTorch as it looks on another machine: its accelerator, and what the accelerator tells about itself."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: str, capability: tuple[int, int] = (0, 0), **properties: Any
    ):
        monkeypatch.setattr(utils, "_platform", lambda: kind)
        monkeypatch.setattr(utils, "_torch_device", lambda: {"hip": "cuda"}.get(kind, kind))
        for cached in ("get_device_capability", "get_device_arch", "get_multiprocessor_count", "check_shared_mem"):
            monkeypatch.setattr(utils, cached, getattr(utils, cached).__wrapped__)
        monkeypatch.setattr(utils, "get_device_smem_optin", utils.get_device_smem_optin.__wrapped__)
        self.entered: list[int] = []
        interface = SimpleNamespace(
            get_device_capability=lambda index: capability,
            get_device_name=lambda index: properties["name"],
            get_device_properties=lambda index: SimpleNamespace(**properties),
            device_count=lambda: 2,
            device=lambda index: self.entered.append(index) or nullcontext(),
        )
        monkeypatch.setattr(torch, "cuda" if kind == "hip" else kind, interface, raising=False)


FLAGS = [name for name in utils._LAZY if name.startswith("IS_") and name not in ("IS_ARM", "IS_GATHER_SUPPORTED")]


@pytest.mark.parametrize(
    ("kind", "capability", "true"),
    [
        ("cpu", (0, 0), ""),
        ("npu", (0, 0), "NPU"),
        ("hip", (9, 4), "AMD"),
        ("xpu", (0, 0), "INTEL INTEL_ALCHEMIST"),
        ("cuda", (7, 5), "NVIDIA"),
        ("cuda", (8, 0), "NVIDIA TF32_SUPPORTED"),
        ("cuda", (9, 0), "NVIDIA NVIDIA_HOPPER TF32_SUPPORTED"),
        ("cuda", (10, 0), "NVIDIA NVIDIA_BLACKWELL NVIDIA_SM100 TF32_SUPPORTED"),
        ("cuda", (12, 0), "NVIDIA NVIDIA_BLACKWELL NVIDIA_SM120 TF32_SUPPORTED"),
        ("cuda", (12, 1), "NVIDIA NVIDIA_BLACKWELL TF32_SUPPORTED"),
    ],
)
def test_flags(kind: str, capability: tuple[int, int], true: str, monkeypatch: pytest.MonkeyPatch):
    Machine(monkeypatch, kind, capability, name="Intel(R) Arc(TM) A770")
    want = {f"IS_{name}" for name in true.split()}
    assert {name for name in FLAGS if getattr(utils, name)} == want
    assert {name for name in FLAGS if getattr(utils, name.lower())} == want


def test_gpu(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(
        monkeypatch, "cuda", (9, 0), multi_processor_count=132, shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
    )  # fmt: skip
    assert utils.get_device_arch() == "90" and utils.get_multiprocessor_count(1) == 132
    assert utils.get_all_max_shared_mem() == [232448] * 2
    assert utils.check_shared_mem() and utils.check_shared_mem("hopper", 1)
    assert not utils.check_shared_mem("hopper", 2)  # there is none
    with utils.custom_device_ctx(1), utils.custom_device_ctx(None):
        assert machine.entered == [1]


def test_gpu_of_amd(monkeypatch: pytest.MonkeyPatch):
    Machine(monkeypatch, "hip", gcnArchName="gfx942:sramecc+", multi_processor_count=304, shared_memory_per_block=65536)
    assert utils.get_device_arch() == "gfx942" and utils.get_multiprocessor_count() == 304
    assert utils.get_all_max_shared_mem() == [65536] * 2 and not utils.check_shared_mem()


@pytest.mark.parametrize("kind", ["cpu", "npu"])
def test_without_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch):
    """An NPU whose driver cannot be reached, as here, has one core like a CPU."""
    machine = Machine(monkeypatch, kind, name="Ascend910B3")
    assert utils.get_device_arch() == ("Ascend910B3" if kind == "npu" else "")
    monkeypatch.setitem(sys.modules, "fla_npu.ops.common.ascend", None)
    assert utils.get_multiprocessor_count() == utils.get_multiprocessor_count(use_aicore=True) == 1
    assert utils.get_all_max_shared_mem() == [-1] and not utils.check_shared_mem()
    with utils.custom_device_ctx(0):
        assert machine.entered == ([0] if kind == "npu" else [])


def test_cores_of_an_npu(monkeypatch: pytest.MonkeyPatch):
    Machine(monkeypatch, "npu")
    counts = SimpleNamespace(core_count=lambda device: 20 + device.index, vector_core_count=lambda device: 40)
    monkeypatch.setattr(torch, "device", lambda kind, index: SimpleNamespace(type=kind, index=index))
    monkeypatch.setitem(sys.modules, "fla_npu.ops.common.ascend", counts)
    assert utils.get_multiprocessor_count(1) == 40 and utils.get_multiprocessor_count(1, use_aicore=True) == 21


def test_shared_memory_of_generations():
    sizes = [utils.Backend.get_shared_memory(arch) for arch in ("ada", "Ampere", "HOPPER", "none", "turing")]
    assert sizes == [101376, 166912, 232448, 102400, 102400]


def test_what_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert utils.check_pytorch_version() and utils.check_pytorch_version("2.13") and utils.check_pytorch_version("2.9")
    assert not utils.check_pytorch_version("2.14")
    utils.check_transformers_version.cache_clear()
    monkeypatch.setattr(utils.metadata, "version", lambda name: {"transformers": "5.24.0"}[name])
    assert utils.check_transformers_version("5.9") and not utils.check_transformers_version("5.25")

    def none(name: str) -> str:
        raise utils.metadata.PackageNotFoundError(name)

    utils.check_transformers_version.cache_clear()
    monkeypatch.setattr(utils.metadata, "version", none)
    assert not utils.check_transformers_version("1.0")
    utils.check_transformers_version.cache_clear()
    assert utils.find_spec_cached("torch.nn") is not None
    assert utils.find_spec_cached("no_such_package") is utils.find_spec_cached("no_such_package.part.of") is None
    for installed in (None, SimpleNamespace(language=SimpleNamespace(gather=1))):
        monkeypatch.setattr(utils, "find_spec_cached", lambda name, spec=installed: spec)
        monkeypatch.setitem(sys.modules, "triton", installed)
        monkeypatch.setitem(sys.modules, "triton.language", installed and installed.language)
        assert utils.IS_GATHER_SUPPORTED is (installed is not None)


def test_ci(monkeypatch: pytest.MonkeyPatch):
    for value, on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("FLA_CI_ENV", value)
        assert utils.FLA_CI_ENV is on


class TestTensorCache:
    def make(self) -> tuple[Any, list[int]]:
        calls: list[int] = []

        @utils.tensor_cache
        def double(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
            calls.append(factor)
            return x * factor

        return double, calls

    def test_same_tensor_is_computed_once(self):
        double, calls = self.make()
        x = torch.ones(3)
        assert double(x) is double(x) and calls == [2]
        assert double(x, factor=3) is double(x, factor=3) and calls == [2, 3]
        assert double(x.clone()) is not double(x)

    def test_change_in_place_is_seen(self):
        double, calls = self.make()
        x = torch.ones(3)
        double(x)
        x.add_(1)
        assert double(x).tolist() == [4, 4, 4] and len(calls) == 2

    def test_inference_tensors_are_computed_every_time(self):
        double, calls = self.make()
        with torch.inference_mode():
            x = torch.ones(3)
            double(x)
            x.add_(1)
            assert double(x).tolist() == [4, 4, 4] and len(calls) == 2

    def test_another_tensor_at_the_same_address_is_another(self):
        double, _ = self.make()
        for value in range(20):
            assert double(torch.full((3,), float(value))).tolist() == [2.0 * value] * 3

    def test_bounded(self):
        double, calls = self.make()
        tensors = [torch.ones(1) for _ in range(20)]
        for x in tensors:
            double(x)
        double(tensors[0])
        assert len(calls) == 21

    def test_device_values_of_bounds(self):
        """The copy that an NPU's `cu_seqlens` is read into, on a CPU tensor here."""
        x = torch.tensor([0, 3, 5])
        assert checks._device_values(x) is checks._device_values(x)
        x[1] = 4
        assert checks._device_values(x) == (0, 4, 5)


def test_input_guard():
    @utils.input_guard
    def both(x: torch.Tensor, y: torch.Tensor | None = None, *rest: torch.Tensor) -> list[bool]:
        return [z.is_contiguous() for z in (x, y, *rest) if z is not None]

    @utils.input_guard(no_guard_contiguous=["x"])
    def not_x(x: torch.Tensor, y: torch.Tensor) -> list[bool]:
        return [x.is_contiguous(), y.is_contiguous()]

    @utils.input_guard(no_guard_contiguous=True)
    def none(x: torch.Tensor) -> bool:
        return x.is_contiguous()

    view = torch.zeros(2, 3).T
    assert both(view, view, view) == [True] * 3 and both(x=view) == [True]
    assert not_x(view, y=view) == [False, True]
    assert not none(view)
    assert utils.contiguous(lambda x: x.is_contiguous())(view)


def test_input_guard_enters_the_device_of_the_first_tensor(monkeypatch: pytest.MonkeyPatch):
    class OnDevice(torch.Tensor):
        number: int

        @property
        def device(self) -> SimpleNamespace:
            return SimpleNamespace(index=self.number)

    def on(number: int) -> torch.Tensor:
        x = torch.zeros(2).as_subclass(OnDevice)
        x.number = number
        return x

    entered: list[int | None] = []
    monkeypatch.setattr(utils, "custom_device_ctx", lambda index: entered.append(index) or nullcontext())
    guarded = utils.input_guard(lambda *args, **kwargs: None)
    guarded(1, on(3), on(2), x=on(1))
    guarded(1, x=on(1))
    guarded(1)
    guarded(torch.zeros(2))
    assert entered == [3, 1, None, None]


def test_autocast_decorators():
    class Double(torch.autograd.Function):
        @staticmethod
        @utils.autocast_custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        @utils.autocast_custom_bwd
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return 2 * dy

    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_checkpoint():
    runs = []

    @utils.checkpoint
    def square(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x * x

    x = torch.full((2,), 3.0, requires_grad=True)
    square(x).sum().backward()
    assert x.grad.tolist() == [6, 6] and len(runs) == 2


def test_deprecate_kwarg():
    @utils.deprecate_kwarg("old", version="2", new_name="new", additional_message="Soon.")
    def renamed(new: int = 0) -> int:
        return new

    @utils.deprecate_kwarg("old", version="2", new_name="new", raise_if_both_names=True)
    def strict(new: int = 0) -> int:
        return new

    @utils.deprecate_kwarg("old", version="2")
    def kept(old: int = 0) -> int:
        return old

    with pytest.warns(
        FutureWarning, match="`old` of `renamed` is deprecated and goes away in version 2: use `new`. Soon."
    ):
        assert renamed(old=3) == 3
    with pytest.warns(FutureWarning):
        assert renamed(old=3, new=4) == 4
    with pytest.raises(ValueError, match="not both"):
        strict(old=3, new=4)
    with pytest.warns(FutureWarning):
        assert kept(old=3) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert renamed(new=1) == 1


def test_deprecate_kwarg_of_a_version_that_is_there():
    def with_options(*options: Any) -> Any:
        return utils.deprecate_kwarg("old", utils.FLA_VERSION, "new", *options)(lambda new=0: new)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert with_options()(old=3) == 3
    with pytest.warns(FutureWarning, match="`old`"):
        assert with_options(True)(old=3) == 3
    with pytest.warns(FutureWarning, match="`old`"):
        assert with_options()(old=3, new=4) == 4
    with pytest.raises(ValueError, match=r"goes away in version 0.6.0: use `new`"):
        with_options(False, True)(old=3)
    with pytest.raises(ValueError, match="not both"):
        with_options(False, False, True)(old=3, new=4)


# --- fla_npu.testing ---


def test_error_measures():
    x = torch.randn(100)
    assert testing.nmse(x, x) == 0 and testing.nmse(torch.zeros(0), torch.zeros(0)) == 0
    assert testing.nmse(1.01 * x, x) == pytest.approx(1e-4, rel=1e-3)
    assert testing.rms_ratio(1.01 * x, x) == pytest.approx(1e-2, rel=1e-3)
    assert testing.nmse(x, torch.zeros(100)) == float("inf")
    assert math.isnan(testing.nmse(x / 0 * 0, x))


@pytest.mark.parametrize("case", testing.CASES)
@pytest.mark.parametrize("channel", [False, True])
def test_inputs(case: str, channel: bool):
    made = testing.make_inputs(case, B=2, T=70, channel=channel, dtype=torch.float16)
    again = testing.make_inputs(case, B=2, T=70, channel=channel, dtype=torch.float16)
    assert all(torch.equal(x, y) for x, y in zip(made, again, strict=True))
    assert made.q.shape == made.k.shape == (2, 70, 2, 16) and made.v.shape == (2, 70, 4, 16)
    assert made.g.shape == ((2, 70, 4, 16) if channel else (2, 70, 4)) and made.beta.shape == (2, 70, 4)
    assert (
        made.q.dtype == made.beta.dtype == torch.float16 and made.g.dtype == made.initial_state.dtype == torch.float32
    )
    assert (made.g <= 0).all() and all(x.isfinite().all() for x in testing.reference(made))
    assert made.q.is_contiguous() == (case != "time fastest")
    check = checks.check_chunk_kda if channel else checks.check_chunk_gdn
    check(**made._asdict())


def test_inputs_are_what_their_names_say():
    assert testing.make_inputs("sudden decay", T=200).g.isinf().any()
    assert testing.make_inputs("beta to two", T=200).beta.max() > 1.5
    assert (testing.make_inputs("zero rows", T=200).q == 0).all(-1).any()
    assert testing.make_inputs("time fastest").q.stride(1) == 1
    assert len(testing.make_inputs("equal keys").k.unique(dim=1)[0]) == 1
    with pytest.raises(ValueError, match="case must be one of ordinary"):
        testing.make_inputs("hard")


def test_reference_of_packed_sequences():
    made = testing.make_inputs(T=20, sequences=2, seed=1)
    o, state = testing.reference(made, cu_seqlens=(0, 13, 20), l2norm=True)
    part = testing.Inputs(*(x[:, :13] for x in made[:5]), made.initial_state[:1])
    first, first_state = testing.reference(part, l2norm=True)
    assert torch.equal(o[:, :13], first) and torch.equal(state[:1], first_state)
