"""Which calls go to the kernels, why others do not, and what a launch asks of the device: nothing.

Nothing is launched here: there need be no triton, and the launchers are replaced by what remembers how it was called.
Tensors of a device that there is not are meta tensors, whose values cannot be read: who tries raises.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fla_npu.errors import ImplementationError, ShapeError
from fla_npu.ops import checks, dispatch, kernels
from fla_npu.ops.common.chunked import chunked_forward
from fla_npu.ops.dispatch import explain, use_implementation, use_precision
from fla_npu.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla_npu.ops.problem import Bounds, Options, Problem
from fla_npu.ops.run import gradients
from fla_npu.planner.chips import CHIPS
from tests.npu import forget_choices, pretend_npus, pretend_triton
from tests.ops.calls import CHUNKED, OPS, RECURRENT, Arguments, make_call, run

UNREADABLE = (NotImplementedError, RuntimeError)
"""What torch raises where a meta tensor's values are asked for."""


@pytest.fixture(autouse=True)
def fresh_choices() -> Iterator[None]:
    forget_choices()
    yield
    forget_choices()


# --- devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", dispatch.OPS)
@pytest.mark.parametrize("name", ["Ascend910B3", "Ascend910_9382"])
def test_npus_run_kernels(op: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_npus(monkeypatch, name)
    pretend_triton(monkeypatch, tmp_path)
    for device in ("npu", "npu:0"):
        assert explain(op, device) == ("triton", "the persistent Triton kernels run on NPUs with triton-ascend")
    assert explain(op, "cpu").implementation == "eager"
    assert explain(op, "cuda").reason.endswith("there are no kernels for cuda")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Ascend310P3", "triton-ascend has no 310P target"),
        ("Ascend310B1", "crashes on the fused kernels for 310B"),
        ("Ascend910_9363", "has the target Ascend910_9363"),
        ("Ascend9999", "nothing is known of the chip 'Ascend9999'"),
    ],
)
def test_npus_that_run_none_say_why(name: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_npus(monkeypatch, "Ascend910B3", name)
    pretend_triton(monkeypatch, tmp_path)
    assert explain("chunk_gdn", "npu:0").implementation == "triton"
    assert explain("chunk_gdn", "npu:1").implementation == "eager"
    assert explain("chunk_gdn", "npu:1").reason.endswith(reason)
    with (
        use_implementation("triton"),
        pytest.raises(ImplementationError, match=f"'triton' cannot run on npu: .*{reason}"),
    ):
        explain("chunk_gdn", "npu:1")


def test_every_chip_can_be_asked_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without an NPU here, or with another."""
    pretend_triton(monkeypatch, tmp_path)
    assert explain("chunk_kda", "npu").implementation == "triton"
    for names in ((), ("Ascend310P3",)):
        pretend_npus(monkeypatch, *names)
        for chip in CHIPS.values():
            choice = explain("fused_recurrent_kda", "npu", chip=chip.name)
            assert (choice.implementation == "triton") is chip.triton
            assert chip.triton or choice.reason.endswith(str(chip.no_triton_reason))


def test_triton_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pretend_npus(monkeypatch, "Ascend910B3")
    pretend_triton(monkeypatch, None)
    assert explain("chunk_gdn", "npu").implementation == "eager"
    assert "triton-ascend is not installed: pip install 'fla-npu[triton]'" in explain("chunk_gdn", "npu").reason
    pretend_triton(monkeypatch, tmp_path, ascend=False)
    assert explain("chunk_gdn", "npu").implementation == "eager"
    assert "the installed triton is not triton-ascend: uninstall" in explain("chunk_gdn", "npu").reason


@pytest.mark.parametrize("op", OPS)
def test_a_cpu_runs_kernels_only_if_asked_and_interpreted(op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    call = make_call(op)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pretend_triton(monkeypatch, tmp_path)
    with use_implementation("triton"), pytest.raises(ImplementationError, match="set TRITON_INTERPRET=1"):
        run(op, call)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pretend_triton(monkeypatch, None)
    monkeypatch.setenv("FLA_NPU_IMPL", "triton")
    with pytest.raises(ImplementationError, match="triton-ascend is not installed"):
        run(op, call)
    monkeypatch.delenv("FLA_NPU_IMPL")
    pretend_triton(monkeypatch, tmp_path / "there")
    assert explain(op).implementation == "eager"
    with use_implementation("triton"):
        assert explain(op).implementation == "triton"


# --- calls --------------------------------------------------------------------------------------------------------


def problem_of(op: str, **options: Any) -> Problem:
    check = {
        "chunk_gdn": checks.check_chunk_gdn,
        "chunk_kda": checks.check_chunk_kda,
        "fused_recurrent_gdn": checks.check_recurrent_gdn,
        "fused_recurrent_kda": checks.check_recurrent_kda,
    }[op]
    return check(**make_call(op, **options))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"dtype": torch.bfloat16, "K": 256, "gate": "softplus", "l2norm": True, "v_first": True}, None),
        ({"T": 0}, None),
        ({"dtype": torch.float64}, "do not compute in float64"),
        ({"K": 257}, "key dimensions up to 256, not 257"),
    ],
    ids=str,
)
def test_calls_that_every_kernel_takes_or_refuses(op: str, options: dict[str, Any], reason: str | None):
    found = kernels.call_refusal(op, problem_of(op, **options))
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_calls_that_one_kind_of_kernel_refuses():
    for op in CHUNKED:
        refusal = kernels.call_refusal(op, problem_of(op, T=5, V=257))
        assert refusal is not None and "value dimensions up to 256" in refusal
    for op in RECURRENT:
        assert kernels.call_refusal(op, problem_of(op, T=5, V=257)) is None
    with torch.inference_mode():
        refusal = kernels.call_refusal("chunk_kda", problem_of("chunk_kda", T=5, return_intermediate_states=True))
    assert refusal is not None and "no intermediate states" in refusal
    without = problem_of("fused_recurrent_gdn", T=5)
    without = without._replace(options=Options(decay="none", scale=1.0))
    assert kernels.call_refusal("fused_recurrent_gdn", without) is None
    assert "need a decay" in str(kernels.call_refusal("chunk_gdn", without))
    call = make_call("fused_recurrent_gdn", T=5)
    call["gk"], call["gv"] = -torch.rand(1, 5, 4, 16), -torch.rand(call["v"].shape)
    call["beta"] = torch.rand(call["v"].shape)
    assert kernels.call_refusal("fused_recurrent_gdn", checks.check_recurrent_gdn(**call)) is None


# --- launches -----------------------------------------------------------------------------------------------------


class Launch(SimpleNamespace):
    """How a launcher was called."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Kernels on every device but the CPU, whose launchers compute nothing; on a CPU if asked, with right results."""
    seen: list[Launch] = []

    def results(tensors: Any, options: Options) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = seen[-1].cu_seqlens
        if tensors.q.device.type == "cpu":
            bounds = None if given is None else tuple(given.tolist())
            return chunked_forward(Problem(tensors, options, bounds))[:2]
        N = tensors.q.shape[0] if given is None else len(given) - 1
        sides = (12, 16) if options.state_v_first else (16, 12)
        state = torch.zeros(N, tensors.v.shape[2], *sides, device=tensors.v.device)
        return torch.zeros_like(tensors.v), state if options.output_final_state else None

    def launch_balanced(tensors: Any, options: Any, config: Any, **arguments: Any) -> Any:
        seen.append(Launch(kind="chunks", config=config, **arguments))
        return results(tensors, options)

    def launch_recurrent(tensors: Any, options: Any, cu_seqlens: Any, **arguments: Any) -> Any:
        seen.append(Launch(kind="tokens", cu_seqlens=cu_seqlens, **arguments))
        o, state = results(tensors, options)
        o = o if arguments.get("out") is None else arguments["out"].copy_(o)
        return o, tensors.initial_state if arguments.get("inplace") else state

    for name, launch in (("segments", launch_balanced), ("decode_kernel", launch_recurrent)):
        module = SimpleNamespace(**{launch.__name__: launch})
        monkeypatch.setitem(sys.modules, f"fla_npu.ops.common.{name}", module)  # type: ignore[arg-type]

    def refusal(device: kernels.Device, *, asked: bool = False) -> str | None:
        return None if asked or device.type != "cpu" else "a CPU"

    monkeypatch.setattr(kernels, "device_refusal", refusal)
    return seen


def on_meta(call: Arguments, *names: str) -> Arguments:
    """The call with its tensors, or those of these names, on a device that cannot be read."""
    return {
        name: x.to("meta") if isinstance(x, torch.Tensor) and (not names or name in names) else x
        for name, x in call.items()
    }


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_a_launch_reads_nothing_from_the_device(op: str, index_dtype: torch.dtype, launches: list[Launch]):
    call = on_meta(make_call(op, bounds=[0, 3, 3, 70], index_dtype=index_dtype))
    o, state = run(op, call)
    assert o.shape == call["v"].shape and state is not None and state.shape[0] == 3
    (launch,) = launches
    assert launch.kind == ("chunks" if op in CHUNKED else "tokens")
    assert launch.cu_seqlens.dtype == torch.int64 and launch.cu_seqlens.device.type == "meta"
    assert op in RECURRENT or launch.lengths is None
    with use_implementation("eager"), pytest.raises(UNREADABLE):
        run(op, call)


@pytest.mark.parametrize("op", CHUNKED)
def test_lengths_that_are_known_balance_the_cores(op: str, launches: list[Launch]):
    call = on_meta(make_call(op, bounds=[0, 3, 3, 70]))
    run(op, {**call, "cu_seqlens_cpu": torch.tensor([0, 3, 3, 70])})
    run(op, {**call, "cu_seqlens": torch.tensor([0, 3, 3, 70])})
    run(op, on_meta(make_call(op, B=2)))
    assert [launch.lengths for launch in launches] == [[3, 0, 67], [3, 0, 67], None]
    assert launches[1].cu_seqlens.device.type == "meta"
    with pytest.raises(ValueError, match="cu_seqlens must start at 0 and end at T=70"):
        run(op, {**call, "cu_seqlens_cpu": torch.tensor([0, 3, 3, 69])})
    with pytest.raises(ShapeError, match="cu_seqlens must be an int32 or int64 tensor"):
        run(op, {**call, "cu_seqlens": call["cu_seqlens"].float()})


@pytest.mark.parametrize("op", OPS)
def test_values_are_read_on_request(op: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLA_NPU_CHECK_VALUES", "1")
    with pytest.raises(UNREADABLE):
        run(op, on_meta(make_call(op, bounds=[0, 3, 70])))
    assert not launches


def test_precomputed_chunks_of_unknown_sequences(launches: list[Launch]):
    """Their number cannot be checked without a read, their shape can."""
    call = on_meta(make_call("chunk_gdn", bounds=[0, 3, 70]))
    run("chunk_gdn", {**call, "chunk_indices": torch.zeros(7, 2, dtype=torch.long, device="meta")})
    with pytest.raises(ShapeError, match=r"of shape \[NT, 2\] for chunk_size=64"):
        run("chunk_gdn", {**call, "chunk_indices": torch.zeros(7, 3, dtype=torch.long, device="meta")})


@pytest.mark.parametrize("op", OPS)
def test_calls_that_kernels_refuse_are_portable(op: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "device_refusal", lambda device, *, asked=False: None)
    call = make_call(op, dtype=torch.float64)
    run(op, call)
    assert not launches
    with use_implementation("triton"), pytest.raises(ImplementationError, match=f"this call of {op}: .* float64"):
        run(op, call)
    run(op, make_call(op))
    assert len(launches) == 1


# --- bounds -------------------------------------------------------------------------------------------------------


def test_bounds_are_read_once_and_late():
    reads = []
    tensor = torch.tensor([0, 2, 5])

    def read() -> tuple[int, ...]:
        reads.append(1)
        return checks.sequence_bounds(tensor, 5)

    bounds = Bounds(tensor, read)
    assert len(bounds) == 3 and not bounds.known and not reads
    assert (*bounds,) == (0, 2, 5) and bounds[1] == 2 and bounds[:-1] == (0, 2) and bounds.known
    assert len(reads) == 1
    tensor[1] = 3
    assert (*bounds,) == (0, 2, 5)


def test_late_bounds_are_those_of_the_call():
    tensor = torch.tensor([0, 2, 6])
    with pytest.raises(ValueError, match="cu_seqlens must start at 0 and end at T=5"):
        Bounds(tensor, lambda: checks.sequence_bounds(tensor, 5)).values()
    bounds = Bounds(tensor, lambda: checks.sequence_bounds(tensor, 6))
    tensor[1] = 3
    with pytest.raises(ValueError, match="cu_seqlens must keep its values until the backward pass"):
        bounds.values()
    with torch.inference_mode():
        assert Bounds(torch.tensor([0, 1]), lambda: (0, 1)).values() == (0, 1)


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "keep"), [("chunk_gdn", False), ("chunk_kda", False), ("chunk_kda", True)])
def test_gradients_are_those_of_the_portable_pass(op: str, keep: bool, launches: list[Launch]):
    """Bit for bit: the forward pass keeps the arguments, and nothing else counts."""
    call = make_call(op, bounds=[0, 1, 1, 40, 80], gate="softplus", l2norm=True, beta="sigmoid", v_first=True)
    if keep:
        call["disable_recompute"] = True
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    leaves = {name: call[name].clone().requires_grad_() for name in names}
    with use_implementation("triton"):
        o, state = run(op, {**call, **leaves})
        with torch.no_grad():
            assert run(op, {**call, **leaves})[0].grad_fn is None
    assert [launch.kind for launch in launches] == ["chunks", "chunks"]
    do, d_state = torch.randn_like(o), torch.randn_like(state)
    torch.autograd.backward((o, state), (do, d_state))
    want = gradients(op, do, d_state, **call)
    for name in names:
        assert torch.equal(leaves[name].grad, getattr(want, name)), name


@pytest.mark.parametrize("op", RECURRENT)
def test_recurrent_kernels_have_no_backward_pass(op: str, launches: list[Launch]):
    call = make_call(op, T=3)
    call["q"].requires_grad_()
    with use_implementation("triton"):
        o, _ = run(op, call)
    assert [launch.kind for launch in launches] == ["tokens"]
    with pytest.raises(NotImplementedError, match="no backward pass"):
        o.sum().backward()


# --- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize(("dtype", "fast"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_precision(op: str, dtype: torch.dtype, fast: bool, launches: list[Launch], monkeypatch: pytest.MonkeyPatch):
    call = on_meta(make_call(op, dtype=dtype))
    run(op, call)
    with use_precision("fast"):
        run(op, call)
        with use_precision("exact"):
            run(op, call)
        run(op, call)
    monkeypatch.setenv("FLA_NPU_PRECISION", "fast")
    run(op, call)
    with use_precision("exact"):
        run(op, call)
    assert [launch.fast for launch in launches] == [False, fast, False, fast, fast, False]


def test_precisions_that_there_are_not(launches: list[Launch], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="precision must be exact or fast, got 'double'"), use_precision("double"):
        pass
    monkeypatch.setenv("FLA_NPU_PRECISION", "high")
    with pytest.raises(ValueError, match="FLA_NPU_PRECISION must be exact or fast, got 'high'"):
        run("chunk_gdn", on_meta(make_call("chunk_gdn")))
    run("chunk_gdn", make_call("chunk_gdn"))  # not what a portable call depends on


# --- states in place ----------------------------------------------------------------------------------------------


def decoding(**options: Any) -> Arguments:
    call = make_call("fused_recurrent_kda", **options)
    del call["output_final_state"]
    return call


def test_states_in_place(launches: list[Launch]):
    call = on_meta(decoding(B=2, T=1))
    version = call["initial_state"]._version
    _, state = fused_recurrent_kda_fwd(**call)
    assert state is call["initial_state"] and state._version > version
    (launch,) = launches
    assert launch.inplace and launch.indices is None and launch.out is None


def test_a_pool_is_not_read(launches: list[Launch], monkeypatch: pytest.MonkeyPatch):
    call = on_meta(decoding(bounds=[0, 2, 5]))
    call["ssm_state_indices"] = torch.zeros(2, 3, dtype=torch.int32, device="meta")
    call["num_accepted_tokens"] = torch.ones(2, dtype=torch.int32, device="meta")
    o, state = fused_recurrent_kda_fwd(**call)
    assert o.shape == call["v"].shape and state is call["initial_state"]
    (launch,) = launches
    assert launch.inplace and launch.indices is call["ssm_state_indices"]
    assert launch.accepted is call["num_accepted_tokens"]
    with use_implementation("eager"), pytest.raises(UNREADABLE):
        fused_recurrent_kda_fwd(**call)
    # Shapes are checked as far as they tell: two sequences of five tokens are not at most two long.
    with pytest.raises(ValueError, match="S >= 3"):
        fused_recurrent_kda_fwd(**{**call, "ssm_state_indices": call["ssm_state_indices"][:, :2]})
    with pytest.raises(ValueError, match="needs inplace_final_state=True"):
        fused_recurrent_kda_fwd(**call, inplace_final_state=False)
    with pytest.raises(ShapeError, match="ssm_state_indices must be an int32 or int64 tensor of shape"):
        fused_recurrent_kda_fwd(**{**call, "ssm_state_indices": call["ssm_state_indices"][:1]})
    monkeypatch.setenv("FLA_NPU_CHECK_VALUES", "1")
    with pytest.raises(UNREADABLE):
        fused_recurrent_kda_fwd(**{**call, "cu_seqlens": torch.tensor([0, 2, 5])})
    assert len(launches) == 1


def test_slots_on_the_host_are_checked_and_brought_over(launches: list[Launch]):
    call = on_meta(decoding(B=2, T=1))
    fused_recurrent_kda_fwd(**call, ssm_state_indices=torch.tensor([1, 0]))
    assert launches[0].indices.device.type == "meta"
    with pytest.raises(ValueError, match="ssm_state_indices must be between 0 and 1"):
        fused_recurrent_kda_fwd(**call, ssm_state_indices=torch.tensor([1, 2]))


def test_out_is_written_directly_where_that_is_safe(launches: list[Launch]):
    call = decoding(B=2, T=1)
    own = torch.empty_like(call["v"])
    other = torch.empty(call["v"].shape, dtype=torch.float64)
    sparse = torch.empty(2, 1, 4, 24)[..., ::2]
    with use_implementation("triton"):
        for out in (own, other, sparse, call["v"]):
            assert fused_recurrent_kda_fwd(**call, out=out)[0] is out
    assert [launch.out is not None for launch in launches] == [True, False, False, False]


def test_what_was_decided_before_torch_npu_came_is_not_kept(monkeypatch, tmp_path):
    pretend_triton(monkeypatch, tmp_path)
    monkeypatch.delattr(torch, "npu", raising=False)
    forget_choices()
    assert explain("chunk_gdn", "npu").implementation == "triton"
    npu = SimpleNamespace(get_device_name=lambda number: "Ascend310P3", is_available=lambda: True)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    assert explain("chunk_gdn", "npu").implementation == "eager"
    forget_choices()


@pytest.mark.parametrize("device", ["npu:x", "", ":0"])
def test_what_is_no_device(device):
    with pytest.raises(ValueError, match="device must be"):
        explain("chunk_gdn", device)


def test_what_is_left_of_triton_ascend_is_not_used(monkeypatch, tmp_path):
    pretend_triton(monkeypatch, tmp_path)
    assert explain("chunk_gdn", "npu", chip="910B3").implementation == "triton"
    (tmp_path / "__init__.py").unlink()
    forget_choices()
    assert "share one folder" in explain("chunk_gdn", "npu", chip="910B3").reason
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(kernels.metadata, "distributions", lambda name: iter([name]))
    forget_choices()
    assert "share one folder" in explain("chunk_gdn", "npu", chip="910B3").reason


def test_a5_runs_the_recurrent_kernels_only(monkeypatch, tmp_path):
    pretend_triton(monkeypatch, tmp_path)
    for op in dispatch.OPS:
        choice = explain(op, "npu", chip="950")
        if op.startswith("chunk"):
            assert choice.implementation == "eager" and "A5" in choice.reason
        else:
            assert choice.implementation == "triton"
