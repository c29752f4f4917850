"""Which implementation runs: the rule, the two ways to override it, refusals, and that implementations agree."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from fla_npu import ops
from fla_npu.errors import ImplementationError
from fla_npu.ops import dispatch
from fla_npu.ops.dispatch import OPS as OP_NAMES
from fla_npu.ops.dispatch import explain, use_implementation
from fla_npu.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla_npu.testing import CASES, nmse
from tests.ops.calls import CHUNKED, OPS, Arguments, assert_accurate, make_call, run


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the implementations that ran, in order."""
    names: list[str] = []

    def spy(name: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return original(*args, **kwargs)

        return wrapper

    table = tuple(replace(x, run=spy(x.name, x.run)) for x in dispatch.IMPLEMENTATIONS)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", table)
    monkeypatch.setattr(dispatch, "_BY_NAME", {x.name: x for x in table})
    return names


@pytest.mark.parametrize("op", OPS)
def test_eager_unless_asked(op: str, ran: list[str]):
    run(op, make_call(op))
    assert ran == ["eager"]
    assert explain(op).implementation == "eager" and "CPU" in explain(op).reason


@pytest.mark.parametrize("op", OPS)
def test_override(op: str, ran: list[str]):
    call = make_call(op)
    with use_implementation("reference"):
        assert explain(op).implementation == "reference" and "use_implementation" in explain(op).reason
        run(op, call)
    run(op, call)
    assert ran == ["reference", "eager"]


def test_overrides_nest(ran: list[str]):
    call = make_call("chunk_gdn")
    with use_implementation("reference"):
        with use_implementation("eager"):
            run("chunk_gdn", call)
        run("chunk_gdn", call)
        with use_implementation("auto"):
            run("chunk_gdn", call)
    assert ran == ["eager", "reference", "eager"]


def test_override_ends_with_an_exception(ran: list[str]):
    with pytest.raises(KeyError), use_implementation("reference"):
        raise KeyError
    run("chunk_gdn", make_call("chunk_gdn"))
    assert ran == ["eager"]


def test_override_of_one_thread_leaves_the_others_alone():
    seen: dict[str, str] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(10)
        seen["other"] = explain("chunk_gdn").implementation
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use_implementation("reference"):
        inside.set()
        assert done.wait(10)
        seen["this"] = explain("chunk_gdn").implementation
    thread.join()
    assert seen == {"this": "reference", "other": "eager"}


def test_environment(ran: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLA_NPU_IMPL", "reference")
    run("chunk_gdn", make_call("chunk_gdn"))
    assert explain("chunk_gdn").implementation == "reference"
    with use_implementation("eager"):
        run("chunk_gdn", make_call("chunk_gdn"))
    monkeypatch.setenv("FLA_NPU_IMPL", "auto")
    run("chunk_gdn", make_call("chunk_gdn"))
    assert ran == ["reference", "eager", "eager"]


def test_public_names_are_those_of_ops():
    assert explain("chunk_gated_delta_rule", "npu", chip="910B3") == explain("chunk_gdn", "npu", chip="910B3")
    given_up = {"fused_chunk_gla", "fused_chunk_delta_rule"}
    for name in {*ops.__all__, "chunk_gated_delta_product"} - given_up:
        assert explain(name).implementation == "eager", name


def test_unknown_names(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ImplementationError, match="no implementation 'cuda': choose from auto, triton, eager, ref"):
        use_implementation("cuda").__enter__()
    with pytest.raises(ValueError, match="op must be one of chunk_gdn, "):
        explain("chunk_gsa")
    monkeypatch.setenv("FLA_NPU_IMPL", "fast")
    with pytest.raises(ImplementationError, match="no implementation 'fast'"):
        run("chunk_gdn", make_call("chunk_gdn"))
    with pytest.raises(ImplementationError, match="no implementation 'fast'"):
        explain("chunk_gdn")


def test_refusals_name_the_reason():
    call = make_call("fused_recurrent_gdn")
    call["gv"] = -torch.rand(call["v"].shape)
    with use_implementation("eager"), pytest.raises(ImplementationError, match=r"'eager' cannot run .* value channel"):
        run("fused_recurrent_gdn", call)
    del call["gv"]
    call["gk"] = -torch.rand(*call["g"].shape, 16)
    with use_implementation("eager"), pytest.raises(ImplementationError, match="one per key channel at once"):
        run("fused_recurrent_gdn", call)
    call = make_call("fused_recurrent_kda")
    call["beta"] = torch.rand(call["v"].shape)
    with use_implementation("eager"), pytest.raises(ImplementationError, match="beta per value channel"):
        run("fused_recurrent_kda", call)
    with (
        torch.inference_mode(),
        use_implementation("reference"),
        pytest.raises(ImplementationError, match=r"'reference' cannot run .* intermediate states"),
    ):
        OPS["chunk_kda"](**make_call("chunk_kda"), return_intermediate_states=True)
    pool = make_call("fused_recurrent_kda", T=1)
    pool["ssm_state_indices"] = torch.arange(pool["initial_state"].shape[0])
    with use_implementation("reference"), pytest.raises(ImplementationError, match="cannot update states in a pool"):
        fused_recurrent_kda_fwd(**pool)


def test_rare_arguments_fall_back(ran: list[str]):
    """Without an override what eager cannot run goes to the reference; a beta per channel of one token it can."""
    call = make_call("fused_recurrent_gdn")
    run("fused_recurrent_gdn", {**call, "gv": -torch.rand(call["v"].shape)})
    run("fused_recurrent_gdn", {**call, "beta": torch.rand(call["v"].shape)})
    one = make_call("fused_recurrent_gdn", T=1)
    run("fused_recurrent_gdn", {**one, "beta": torch.rand(one["v"].shape)})
    assert ran == ["reference", "reference", "eager"]


@pytest.mark.parametrize("op", OP_NAMES)
@pytest.mark.parametrize("device", ["cpu", "npu", "npu:3", "cuda", torch.device("cpu"), torch.device("cuda", 1)])
def test_every_op_can_be_explained_on_every_device(op: str, device: Any):
    """Also on devices that this machine does not have."""
    choice = explain(op, device)
    assert choice.implementation in {x.name for x in dispatch.IMPLEMENTATIONS}
    assert choice.reason


def test_decisions_are_logged_once(caplog: pytest.LogCaptureFixture):
    dispatch._choose.cache_clear()
    with caplog.at_level("INFO", logger="fla_npu"):
        for _ in range(3):
            run("chunk_gdn", make_call("chunk_gdn"))
    assert [record.message.split(":")[0] for record in caplog.records] == ["chunk_gdn on cpu"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES)
def test_implementations_agree(op: str, case: str):
    options: Arguments = {"l2norm": True, "beta": "negative", "v_first": True}
    call = make_call(op, case, bounds=[0, 1, 1, 40, 110], gate="softplus", **options)
    for tensors in (call, make_call(op, case, B=2, T=80, dtype=torch.bfloat16), make_call(op, case, T=1)):
        o, state = run(op, tensors)
        with use_implementation("reference"):
            want_o, want_state = run(op, tensors)
        assert o.dtype == want_o.dtype and state.dtype == want_state.dtype
        # Each rounds its own result to the dtype of o: two elements on both sides of a middle differ by a whole unit.
        assert_accurate("o", o, want_o, 4e-11 + torch.finfo(o.dtype).eps ** 2 / 4)
        assert_accurate("state", state, want_state, 4e-11)


@pytest.mark.parametrize("op", CHUNKED)
def test_gradients_of_implementations_agree(op: str):
    call = make_call(op, bounds=[0, 1, 1, 40, 80], gate="softplus", l2norm=True, beta="sigmoid", v_first=True)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    grads = []
    for name in ("eager", "reference"):
        leaves = {name: call[name].clone().requires_grad_() for name in names}
        with use_implementation(name):
            o, state = run(op, {**call, **leaves})
        torch.autograd.backward((o, state), (torch.ones_like(o), torch.ones_like(state)))
        grads.append({name: x.grad for name, x in leaves.items()})
    for name in names:
        assert nmse(grads[0][name], grads[1][name]) < 1e-7, name


def test_what_runs_in_place_is_eager(ran: list[str]):
    call = make_call("fused_recurrent_kda", T=1)
    del call["output_final_state"]
    fused_recurrent_kda_fwd(**call)
    assert ran == ["eager"]
    assert explain("fused_recurrent_kda_fwd").implementation == "eager"
