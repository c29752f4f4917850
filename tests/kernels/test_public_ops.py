"""The public ops by the kernels, on CPU tensors in the interpreter: forward against the recurrence in float64,
gradients against those of the portable path. The tests beside this one are about the kernels, this is about the way
to them.
"""

from typing import Any

import pytest
import torch

from fla_npu.errors import ImplementationError
from fla_npu.ops import dispatch, kernels
from fla_npu.ops.common import decode_kernel, gate_kernel, launch, segments
from fla_npu.ops.dispatch import explain, use_implementation, use_precision
from fla_npu.ops.gated_delta_rule import chunk_gated_delta_rule
from fla_npu.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla_npu.testing import nmse
from tests.ops.calls import CHUNKED, OPS, assert_accurate, expected, make_call, run
from tests.ops.test_state_pool import by_tokens, call_of, pool_of

CALLS: dict[str, dict[str, Any]] = {
    "batch": {"B": 2, "T": 70},
    "pack": {"bounds": [0, 1, 1, 40, 60], "index_dtype": torch.int32, "gate": "softplus", "l2norm": True},
    "v first": {"T": 20, "gate": "softplus without bias", "beta": "negative", "v_first": True, "dtype": torch.bfloat16},
    "no state": {"T": 9, "state": False, "K": 20, "V": 37, "H": 1, "HV": 3, "beta": "sigmoid"},
    "empty": {"T": 0},
}


@pytest.mark.parametrize("op", OPS)
def test_on_a_cpu_kernels_have_to_be_asked_for(op: str):
    assert explain(op).implementation == "eager"
    with use_implementation("triton"):
        assert explain(op).implementation == "triton"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", CALLS)
def test_forward(op: str, name: str):
    call = make_call(op, **CALLS[name])
    with use_implementation("triton"):
        o, state = run(op, call)
    want_o, want_state = expected(op, call)
    assert o.dtype == call["v"].dtype and state is not None and state.dtype == torch.float32
    assert_accurate("o", o, want_o)
    assert_accurate("state", state, want_state)


@pytest.mark.parametrize("op", CHUNKED)
def test_gradients(op: str):
    """The backward pass starts from the arguments alone, so its result is that of a portable call, bit for bit."""
    call = make_call(op, bounds=[0, 1, 1, 40], gate="softplus", l2norm=True, beta="sigmoid", v_first=True)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    grads = []
    for implementation in ("triton", "eager"):
        leaves = {name: call[name].clone().requires_grad_() for name in names}
        with use_implementation(implementation):
            o, state = run(op, {**call, **leaves})
        torch.autograd.backward((o, state), (torch.ones_like(o), torch.ones_like(state)))
        grads.append({name: x.grad for name, x in leaves.items()})
    for name in names:
        assert torch.equal(grads[0][name], grads[1][name]), name


def test_recurrent_with_every_decay_and_beta_per_value():
    """What has no chunk form: eager leaves it to the token loop, the kernel does it."""
    call = make_call("fused_recurrent_gdn", T=3)
    call["gk"], call["gv"] = -torch.rand(1, 3, 4, 16), -torch.rand(call["v"].shape)
    call["beta"] = torch.rand(call["v"].shape)
    with use_implementation("triton"):
        o, state = run("fused_recurrent_gdn", call)
    want_o, want_state = expected("fused_recurrent_gdn", call)
    assert_accurate("o", o, want_o)
    assert_accurate("state", state, want_state)


@pytest.mark.parametrize("op", CHUNKED)
def test_fast_is_less_exact(op: str):
    """Operands of 8 bits leave a state with an error that no float32 product has, and that 16 bits bound."""
    call = make_call(op, T=40, dtype=torch.bfloat16, gate="softplus", l2norm=True)
    _, want = expected(op, call)
    with use_implementation("triton"):
        _, exact = run(op, call)
        with use_precision("fast"):
            _, fast = run(op, call)
    assert nmse(exact, want) < 1e-11 < nmse(fast, want) < (8 * 2.0**-8) ** 2


@pytest.mark.parametrize("op", CHUNKED)
def test_a_compiled_call_runs_the_kernels(op: str, monkeypatch: pytest.MonkeyPatch):
    launched = []
    original = segments.launch_balanced

    def spy(*args: Any, **kwargs: Any) -> Any:
        launched.append(op)
        return original(*args, **kwargs)

    monkeypatch.setattr(segments, "launch_balanced", spy)
    call = make_call(op, T=20)
    compiled = torch.compile(OPS[op], backend="eager", fullgraph=True)
    with use_implementation("triton"):
        o, _ = compiled(**call)
    assert launched == [op]
    assert_accurate("o", o, expected(op, call)[0])


class Unlaunched:
    """A kernel that is given its arguments and does nothing."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches += 1

        return launch


@pytest.mark.parametrize("op", [*OPS, "fused_recurrent_kda_fwd"])
@pytest.mark.parametrize("known", [False, True])
def test_launchers_read_nothing_from_the_device(op: str, known: bool, monkeypatch: pytest.MonkeyPatch):
    """Meta tensors have no values: who asks for one, or copies one to the host, raises."""
    stubs = {}
    for module, name in (
        (launch, "delta_rule_kernel"),
        (gate_kernel, "gates_kernel"),
        (gate_kernel, "norms_kernel"),
        (decode_kernel, "recurrent_kernel"),
    ):
        stubs[name] = Unlaunched()
        monkeypatch.setattr(module, name, stubs[name])
    monkeypatch.setattr(kernels, "device_refusal", lambda device, *, asked=False: None)
    options = {"gate": "softplus", "l2norm": True, "beta": "sigmoid", "v_first": True, "index_dtype": torch.int32}
    call = make_call(op.removesuffix("_fwd"), bounds=[0, 3, 3, 70], **options)
    call = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    if known and op in CHUNKED:
        call["cu_seqlens_cpu"] = torch.tensor([0, 3, 3, 70])
    elif known:
        call["cu_seqlens"] = torch.tensor([0, 3, 3, 70])
    if op == "fused_recurrent_kda_fwd":
        call["ssm_state_indices"] = torch.zeros(3, 67, dtype=torch.int32, device="meta")
        o, state = fused_recurrent_kda_fwd(**call)
    else:
        o, state = run(op, call)
    assert o.device.type == "meta" and state is not None and state.shape == call["initial_state"].shape
    used = {name: stub.launches for name, stub in stubs.items() if stub.launches}
    chunked = {"delta_rule_kernel": 1, "gates_kernel": 1, "norms_kernel": 1}
    assert used == (chunked if op in CHUNKED else {"recurrent_kernel": 1})


@pytest.mark.parametrize("options", [{"B": 2, "T": 2}, {"lengths": [2, 0, 1]}], ids=str)
def test_states_in_place(options: dict[str, Any]):
    call = call_of(v_first=True, gate="bounded", l2norm=True, **options)
    want_o, want_state = expected("fused_recurrent_kda", call)
    state, out = call["initial_state"].clone(), torch.empty_like(call["v"])
    with use_implementation("triton"):
        o, returned = fused_recurrent_kda_fwd(**{**call, "initial_state": state, "out": out})
    assert returned is state and o is out
    assert_accurate("o", o, want_o)
    assert_accurate("state", state, want_state)


@pytest.mark.parametrize("v_first", [False, True])
def test_a_pool_of_states(v_first: bool):
    """Several tokens per sequence, a slot for each, from the last accepted one on."""
    lengths = [2, 0, 3]
    call = call_of(lengths, v_first=v_first)
    pool = pool_of(call, 12)
    before = pool.clone()
    indices, accepted = torch.tensor([[3, 1, 7], [0, 2, 4], [11, 8, 5]]), torch.tensor([1, 1, 3])
    with use_implementation("triton"):
        o, returned = fused_recurrent_kda_fwd(
            **{**call, "initial_state": pool, "ssm_state_indices": indices, "num_accepted_tokens": accepted}
        )
    want_o, after = by_tokens(call, lengths, [before[[3]], before[[0]], before[[5]]])
    assert returned is pool
    assert_accurate("o", o, want_o)
    written = set()
    for row, states in zip(indices.tolist(), after, strict=True):
        for slot, state in zip(row, states, strict=False):
            assert_accurate(f"slot {slot}", pool[[slot]], state)
            written.add(slot)
    left_alone = [slot for slot in range(12) if slot not in written]
    assert len(written) == 5 and torch.equal(pool[left_alone], before[left_alone])


def test_a_pool_that_is_only_read():
    call = call_of(B=3, T=1)
    pool = pool_of(call, 5)
    before = pool.clone()
    arguments = {**call, "initial_state": pool, "ssm_state_indices": torch.tensor([4, 0, 2])}
    with use_implementation("triton"):
        o, state = fused_recurrent_kda_fwd(**arguments, inplace_final_state=False, output_final_state=True)
    want_o, want_state = expected("fused_recurrent_kda", {**call, "initial_state": before[[4, 0, 2]]})
    assert_accurate("o", o, want_o)
    assert_accurate("state", state, want_state)
    assert torch.equal(pool, before)


def test_the_table_starts_with_the_kernels():
    assert [one.name for one in dispatch.IMPLEMENTATIONS] == ["triton", "eager", "reference"]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_the_thread_does_not_matter(default):
    from fla_npu.ops.common.launch import flags, no_state

    flags.cache_clear()
    no_state.cache_clear()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16, dtype=torch.float32) for _ in range(3))
    g, beta = -torch.rand(1, 40, 2, dtype=torch.float32), torch.rand(1, 40, 2, dtype=torch.float32)
    arguments = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    with use_implementation("triton"):
        wanted = chunk_gated_delta_rule(q, k, v, g, beta, **arguments)
        flags.cache_clear()
        no_state.cache_clear()
        torch.set_default_dtype(default)
        try:
            found = chunk_gated_delta_rule(q, k, v, g, beta, **arguments)
        finally:
            torch.set_default_dtype(torch.float32)
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y)


def test_lazily_negated_tensors_are_read_with_their_sign():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    g, beta = -torch.rand(1, 20, 2), torch.rand(1, 20, 2)
    with use_implementation("triton"):
        wanted, _ = chunk_gated_delta_rule(-q, k, v, g, beta)
        found, _ = chunk_gated_delta_rule(torch._neg_view(q), k, v, g, beta)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("l2norm", [False, True])
def test_bounds_may_lie_apart_in_memory(l2norm):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    g, beta = -torch.rand(1, 20, 2), torch.rand(1, 20, 2)
    bounds = torch.tensor([0, 9, 3, 9, 20, 9])[::2]
    arguments = {"use_qk_l2norm_in_kernel": l2norm, "scale": 0.25}
    with use_implementation("triton"):
        found, _ = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=bounds, **arguments)
        wanted, _ = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=bounds.contiguous(), **arguments)
    assert torch.equal(found, wanted)


def test_states_that_share_memory_are_not_updated_in_place():
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 1, 2, 16) for _ in range(4))
    beta = torch.rand(2, 1, 2)
    states = torch.zeros(1, 2, 16, 16).expand(2, 2, 16, 16)
    with use_implementation("triton"), pytest.raises(ValueError, match="initial_state"):
        fused_recurrent_kda_fwd(q, k, v, -g.abs(), beta, initial_state=states, inplace_final_state=True)


def test_fake_tensors_are_not_handed_to_kernels():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), use_implementation("triton"):
        q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
        with pytest.raises(ImplementationError, match="stand for others"):
            chunk_gated_delta_rule(q, k, v, -torch.rand(1, 20, 2), torch.rand(1, 20, 2))
