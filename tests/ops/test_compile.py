"""`torch.compile`, `torch.export` and `torch.library`: the ops as opaque nodes, without a graph break."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fla_npu.ops import library
from fla_npu.ops.common.recurrence import delta_recurrence
from fla_npu.ops.library import delta_rule
from fla_npu.testing import nmse
from tests.ops.calls import CHUNKED, OPS, Arguments, make_call

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
EVERYTHING: Arguments = {"l2norm": True, "gate": "softplus", "beta": "sigmoid", "v_first": True}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def compiled(op: str, backend: Any = "aot_eager", **options: Any) -> Any:
    """The op inside a larger function, whose own arithmetic is traced; and that function itself."""

    def model(call: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        o, state = OPS[op](**{**call, "v": call["v"] * 2})
        return o + 1, state

    return torch.compile(model, fullgraph=True, backend=backend, **options), model


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        EVERYTHING,
        {"output_final_state": False, "state": False, "scale": 0.3},
        {"bounds": [0, 1, 1, 40, 90]},
        {"T": 1, "dtype": torch.bfloat16},
        {"case": "time fastest", "dtype": torch.float16},
    ],
    ids=str,
)
def test_forward(op: str, options: Arguments):
    call = make_call(op, **options)
    fast, plain = compiled(op)
    for x, y in zip(fast(call), plain(call), strict=True):
        assert (x is None and y is None) or (torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride())


@pytest.mark.parametrize("op", CHUNKED)
@pytest.mark.parametrize(
    "options",
    [{}, EVERYTHING, {"bounds": [0, 0, 1, 40, 90, 90], **EVERYTHING}, {"output_final_state": False, "state": False}],
    ids=str,
)
def test_backward(op: str, options: Arguments):
    call = make_call(op, **options)
    grads = []
    for function in compiled(op):
        leaves = {name: call[name].clone().requires_grad_() for name in INPUTS if name in call}
        results = [x for x in function({**call, **leaves}) if x is not None]
        starts = [torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) for x in results]
        torch.autograd.backward(results, starts)
        grads.append({name: x.grad for name, x in leaves.items()})
    for name, x in grads[0].items():
        assert torch.equal(x, grads[1][name]), name


@pytest.mark.parametrize("options", [{"disable_recompute": True}, {"gate": "bounded", "safe_gate": True}], ids=str)
def test_options_of_kda(options: Arguments):
    call = make_call("chunk_kda", **options)
    fast, plain = compiled("chunk_kda")
    q = [call["q"].clone().requires_grad_() for _ in range(2)]
    for x, function in zip(q, (fast, plain), strict=True):
        function({**call, "q": x})[0].sum().backward()
    assert torch.equal(q[0].grad, q[1].grad)


@pytest.mark.parametrize("op", OPS)
def test_any_length_with_one_graph(op: str):
    counter = CompileCounterWithBackend("aot_eager")
    fast, plain = compiled(op, counter, dynamic=True)
    for T in (70, 65, 130, 300):
        call = make_call(op, T=T)
        assert torch.equal(fast(call)[0], plain(call)[0])
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", CHUNKED)
def test_any_length_backward(op: str):
    fast, plain = compiled(op, dynamic=True)
    for T in (70, 130):
        call = make_call(op, T=T)
        grads = []
        for function in (fast, plain):
            k = call["k"].clone().requires_grad_()
            function({**call, "k": k})[0].square().sum().backward()
            grads.append(k.grad)
        assert torch.equal(*grads)


@pytest.mark.parametrize("op", OPS)
def test_another_pack_with_one_graph(op: str):
    """The bounds are values, not part of the graph."""
    counter = CompileCounterWithBackend("aot_eager")
    fast, plain = compiled(op, counter)
    for bounds in ([0, 30, 90], [0, 31, 90], [0, 90, 90]):
        call = make_call(op, bounds=bounds)
        assert torch.equal(fast(call)[0], plain(call)[0])
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", OPS)
def test_refusals_reach_the_caller(op: str):
    call = make_call(op)
    fast, _ = compiled(op)
    with pytest.raises(Exception, match="beta must have shape"):
        fast({**call, "beta": call["beta"][:, :-1]})


def arguments_of(op: str, call: Arguments) -> tuple[Any, ...]:
    """What a traced call hands to the custom op."""
    taken: list[Any] = []

    def take(*args: Any) -> tuple[None, None]:
        taken.extend(args)
        return None, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "delta_rule", take)
        library.traced(op, call)
    return tuple(taken)


SAMPLES = [
    ("chunk_gdn", {}),
    ("chunk_gdn", EVERYTHING),
    ("chunk_gdn", {"dtype": torch.bfloat16, "output_final_state": False, "state": False}),
    ("chunk_gdn", {"case": "time fastest", "bounds": [0, 0, 40, 90]}),
    ("chunk_kda", {"dtype": torch.float16, "v_first": True, "bounds": [0, 40, 90]}),
    ("chunk_kda", {"gate": "bounded", "T": 1}),
    ("chunk_kda", {"T": 0}),
]


@pytest.mark.parametrize(("op", "options"), SAMPLES, ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_library(op: str, options: Arguments, grad: bool):
    """Schema, fake kernel, autograd registration and tracing, as `torch.library` tests them."""
    call = make_call(op, **options)
    if grad:
        for name in INPUTS:
            if name in call:
                call[name] = call[name].clone().requires_grad_()
    torch.library.opcheck(delta_rule, arguments_of(op, call))


@pytest.mark.parametrize("op", ["fused_recurrent_gdn", "fused_recurrent_kda"])
@pytest.mark.parametrize("T", [1, 20])
def test_library_of_recurrent_ops(op: str, T: int):
    torch.library.opcheck(delta_rule, arguments_of(op, make_call(op, T=T, v_first=True)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 20]])
@pytest.mark.parametrize("final", [False, True])
def test_shapes_without_computing(op: str, v_first: bool, bounds: list[int] | None, final: bool):
    call = make_call(op, T=20, B=2, v_first=v_first, bounds=bounds, dtype=torch.bfloat16, output_final_state=final)
    real = delta_rule(*arguments_of(op, call))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        traced = delta_rule(*arguments_of(op, fake))
    for x, y in zip(traced, real, strict=True):
        assert (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device)


class Tiny(torch.nn.Module):
    """A layer around an op."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.inner = op, torch.nn.Linear(8, 8)

    def forward(self, q, k, v, g, beta, state):
        v = self.inner(v)
        return OPS[self.op](q=q, k=k, v=v, g=g, beta=beta, initial_state=state, output_final_state=True)


@pytest.mark.parametrize("op", OPS)
def test_export(op: str):
    """One node, and the exported program computes the same; also at a length that was not traced."""
    call = make_call(op, K=8, V=8, T=70)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    module = Tiny(op).eval()
    T = torch.export.Dim("T", min=2, max=4096)
    shapes = {name: {1: T} for name in names[:-1]} | {"state": None}
    program = torch.export.export(module, tuple(call[name] for name in names), dynamic_shapes=shapes)
    ops = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.fla_npu.delta_rule.default in ops
    for length in (70, 131):
        other = make_call(op, K=8, V=8, T=length)
        tensors = tuple(other[name] for name in names)
        for x, y in zip(program.module()(*tensors), module(*tensors), strict=True):
            assert nmse(x, y) < 1e-12


def test_what_cannot_be_traced_is_refused():
    function = torch.compile(
        lambda call: OPS["chunk_kda"](**call, return_intermediate_states=True), backend="aot_eager", fullgraph=True
    )
    with torch.inference_mode(), pytest.raises(Exception, match=r"not available under torch\.compile"):
        function(make_call("chunk_kda", T=100))


def test_decay_and_beta_per_value_channel_in_a_graph():
    call = make_call("fused_recurrent_gdn", T=9)
    call["gv"] = -torch.rand(call["v"].shape, generator=torch.Generator().manual_seed(0))
    call["beta"] = torch.rand(call["v"].shape, generator=torch.Generator().manual_seed(0))
    fast, plain = compiled("fused_recurrent_gdn")
    assert torch.equal(fast(call)[0], plain(call)[0])
    names = ("beta", "g", "gv", "initial_state")
    want, _ = delta_recurrence(call["q"], call["k"], 2 * call["v"], **{name: call[name] for name in names})
    assert nmse(fast(call)[0] - 1, want) < 1e-11
