"""What once went wrong in the ops and does not fit under the headings of the other files."""

import sys
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fla_npu.testing import nmse
from fla_npu.utils import tensor_cache
from tests.ops.calls import CHUNKED, DECAY_GRADIENT_NMSE, OPS, check, expected, make_call, run
from tests.ops.test_backward import expected_gradients, gradients
from tests.ops.test_invariants import TOKENS, LiveMemory, bytes_of, repeated


# 1 (serious) ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(op: str, T: int, dtype: torch.dtype):
    """o has the dtype of q and v, states are float32; gates and beta may have any dtype of their own."""
    call = make_call(op, T=T, dtype=dtype)
    for gate_dtype in (torch.float32, torch.bfloat16, torch.float16):
        call["g"], call["beta"] = call["g"].to(gate_dtype), call["beta"].to(gate_dtype)
        check(op, call)
    if op != "chunk_kda":
        call["initial_state"] = call["initial_state"].to(torch.bfloat16)
        check(op, call)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scale_is_applied_in_float32(op: str, dtype: torch.dtype):
    """K = 128: the scale is no power of two, and q times it must not be rounded to 16 bits."""
    call = make_call(op, T=100, K=128, dtype=dtype)
    want, _ = expected(op, call)
    assert nmse(run(op, call)[0], want) < 1.05 * nmse(want.to(dtype), want)


def test_functional_transform_with_kept_states():
    call = make_call("chunk_kda", T=100)
    want = torch.func.grad(lambda q: run("chunk_kda", {**call, "q": q})[0].sum())(call["q"])
    got = torch.func.grad(lambda q: run("chunk_kda", {**call, "q": q, "disable_recompute": True})[0].sum())(call["q"])
    assert torch.equal(got, want)


@pytest.mark.parametrize("rare", ["gv", "beta"])
def test_autocast_changes_nothing_token_by_token(rare: str):
    call = make_call("fused_recurrent_gdn", T=40, K=32, V=32)
    call[rare] = -torch.rand(call["v"].shape, generator=torch.Generator().manual_seed(0))
    want = run("fused_recurrent_gdn", call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run("fused_recurrent_gdn", call)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("op", CHUNKED)
def test_gradients_of_a_call_of_scale_zero(op: str):
    grads = gradients(op, make_call(op, scale=0.0, l2norm=True))
    assert not grads["q"].any() and grads["k"].isfinite().all()


def test_fake_tensors_leave_nothing_behind():
    """Constants cached under a FakeTensorMode (memory estimates, tracers) are used by the next real call."""
    call = make_call("chunk_gdn", T=29)
    with FakeTensorMode() as mode:
        run("chunk_gdn", {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()})
    check("chunk_gdn", call)


@pytest.mark.parametrize("strength", [3.0, 6.0])
def test_backward_keeps_one_state_per_chunk_for_pieces_too(strength: float):
    """Pieces of 32 or 16 tokens must not keep two or four states per chunk of 64."""
    extra = []
    for times in (4, 8):
        call = make_call("chunk_kda", T=512)
        call["g"] = -strength * torch.rand(call["g"].shape, generator=torch.Generator().manual_seed(0))
        call = repeated(call, times)
        leaves = {name: call[name].clone().requires_grad_() for name in (*TOKENS, "initial_state")}
        results = run("chunk_kda", call | leaves)
        starts = [torch.ones_like(x) for x in results]
        with LiveMemory() as memory:
            torch.autograd.backward(results, starts)
        states = times * 512 // 64 * bytes_of(call["initial_state"])
        extra.append(memory.peak - bytes_of(*(x.grad for x in leaves.values())) - states)
    assert extra[1] - extra[0] <= 4096


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize("total", [-640.0, -1280.0])
def test_gradient_of_a_strong_decay(op: str, total: float):
    call = make_call(op, T=150, K=32, V=32)
    call["g"] = torch.full_like(call["g"], total / 64)
    assert nmse(gradients(op, call)["g"], expected_gradients(op, call)["g"]) < DECAY_GRADIENT_NMSE


@pytest.mark.parametrize("op", OPS)
def test_float64_has_its_own_constants(op: str):
    call = make_call(op, T=100, dtype=torch.float64)
    for x, y in zip(run(op, call), expected(op, call), strict=True):
        assert nmse(x, y) < 1e-27


@pytest.mark.parametrize("op", ["fused_recurrent_gdn", "fused_recurrent_kda"])
def test_compiled_recurrent_op_refuses_only_the_backward_pass(op: str):
    """A compiled graph contains the backward pass whether anybody runs it or not."""
    call = make_call(op, T=3)
    q = call["q"].clone().requires_grad_()
    compiled = torch.compile(lambda q: run(op, {**call, "q": q})[0], fullgraph=True, backend="aot_eager")
    o = compiled(q)
    assert torch.equal(o, run(op, call)[0])
    with pytest.raises(NotImplementedError, match="no backward pass"):
        o.sum().backward()


def test_compiled_call_takes_arguments_without_effect():
    call = make_call("chunk_kda", bounds=[0, 20, 50, 50])
    compiled = torch.compile(
        lambda q: OPS["chunk_kda"](**{**call, "q": q}, use_graph=True, max_num_seqs=3)[0], backend="aot_eager"
    )
    assert torch.equal(compiled(call["q"]), run("chunk_kda", call)[0])


@pytest.mark.parametrize("op", OPS)
def test_shapes_of_meta_tensors(op: str):
    call = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in make_call(op, T=70).items()}
    o, state = run(op, call)
    assert o.device.type == state.device.type == "meta"
    assert o.shape == call["v"].shape and state.shape == call["initial_state"].shape


def test_remembered_results_serve_several_threads():
    """The layers of a model share `tensor_cache`; threads must not disturb each other's search in it."""
    remembered = tensor_cache(lambda x: x.sum().item())
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for i in range(2000):
                assert remembered(torch.full((2,), float(i))) == 2 * i
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
