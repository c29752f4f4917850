"""How accurate the chunk kernel is: the bounds of the HA-NPU paper for `exact`, bounds from the formats for `fast`, and
what has broken implementations of these ops.

**Sampled.** The paper has 360 instances of GDN with up to 4096 tokens; `tests/ops/test_accuracy_grid.py` has as many on
the CPU path. Here, where a chunk takes a tenth of a second, each op has one instance of 256 tokens (4 chunks of 64) per
decay (`logsigmoid(u)` times 0.01, 0.1, 1, 4) with K = V = 128, one key head and one value head, and per decay one of
192 tokens with K = V = 64, one key head and two value heads. Longer sequences are not sampled: an error made in a chunk
does not grow later (`calls`), and o is no older than what the state holds.

**16 bits in `fast`.** Rounding x to float16 costs `(ulp / x)^2 / 12` of its square, in the mean over mantissas
`2^-20 / 12 * 3 / (8 log 2) = 4.3e-8`: `CAST`. A result o passes 8 roundings: S as operand, what is read of it, R, T, u,
P (KDA: q or k with their decays), the factors of rows, and o itself; a state as many, the last one being u scaled.
Independent roundings add in squares: `8 CAST`. bfloat16 has an ulp 8 times as large, and the interpreter cuts off, by
`ulp^2 / 3` in the mean instead of `ulp^2 / 12`, and always to one side, so that errors add in size: `8^2 4 8^2 CAST`.
"""

import math

import pytest
import torch

from fla_npu.ops.common.configs import Config
from fla_npu.testing import nmse
from tests.kernels.calls import EPS, Call, check, definition, make_call, run

OPS = {"gdn": False, "kda": True}
OUTPUT_BOUND, STATE_BOUND = 5.23e-8, 9.38e-12
"""Of the paper, with float16 inputs and outputs, float32 gates and states."""

CAST = 2.0**-20 / 12 * 3 / (8 * math.log(2))
CASTS = 8
FAST_BOUND = {torch.float16: CASTS * CAST, torch.bfloat16: CASTS**2 * 4 * 8**2 * CAST}


def instance(op: str, D: int, T: int, HV: int, strength: float, dtype: torch.dtype, seed: int) -> Call:
    call = make_call(T=T, H=1, HV=HV, K=D, V=D, channel=OPS[op], dtype=dtype, seed=seed)
    u = torch.randn(call.tensors.g.shape, generator=torch.Generator().manual_seed(seed))
    g = torch.nn.functional.logsigmoid(u) * strength
    return call._replace(tensors=call.tensors._replace(g=g, beta=call.tensors.beta.float()))


def grid(op: str, dtype: torch.dtype):
    for seed, strength in enumerate((0.01, 0.1, 1.0, 4.0)):
        yield instance(op, 128, 256, 1, strength, dtype, seed)
        yield instance(op, 64, 192, 2, strength, dtype, 10 + seed)


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("op", OPS)
def test_exact_has_the_accuracy_of_the_paper(op, chunk, record_property):
    outputs, states = [], []
    for call in grid(op, torch.float16):
        if chunk < 64 and call.tensors.q.shape[3] > 64:
            continue
        o, final = run(call, Config(chunk=chunk))
        wanted = definition(call)
        outputs.append(nmse(o, wanted.o))
        states.append(nmse(final, wanted.final))
    record_property("NMSE of o", max(outputs))
    record_property("NMSE of states", max(states))
    print(f"{op} C={chunk}: NMSE of o at most {max(outputs):.3g}, of the final state at most {max(states):.3g}")
    assert max(outputs) <= OUTPUT_BOUND and max(states) <= STATE_BOUND


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_fast_has_the_accuracy_of_its_operands(op, dtype, record_property):
    outputs, states = [], []
    for call in grid(op, dtype):
        o, final = run(call, fast=True)
        wanted = definition(call)
        outputs.append(nmse(o, wanted.o))
        states.append(nmse(final, wanted.final))
    record_property("NMSE of o", max(outputs))
    record_property("NMSE of states", max(states))
    print(f"{op} {dtype}: NMSE of o at most {max(outputs):.3g}, of the final state at most {max(states):.3g}")
    assert max(outputs) <= FAST_BOUND[dtype] and max(states) <= FAST_BOUND[dtype]
    # And it is `fast` that ran: the state of `exact` has no 16-bit number in it.
    assert min(states) > CAST / 10


def adversary(kind: str, op: str, dtype: torch.dtype = torch.float32, T: int = 130) -> Call:
    """Method notes, section 6: what repeated tokens, padding and silence look like."""
    call = make_call(T=T, HV=1, K=32, V=32, channel=OPS[op], dtype=dtype, l2norm=kind == "silence", seed=3)
    q, k, v, g, beta, *rest = call.tensors
    if kind in ("equal keys", "one token"):
        k, g, beta = k[:, :1].expand_as(k).clone(), torch.full_like(g, -1e-3), torch.full_like(beta, 0.99)
    if kind == "one token":
        q, v = q[:, :1].expand_as(q).clone(), v[:, :1].expand_as(v).clone()
    if kind == "opposite keys":
        sign = torch.ones(T, dtype=dtype)
        sign[1::2] = -1
        k, g, beta = k[:, :1] * sign[:, None, None], torch.zeros_like(g), torch.ones_like(beta)
    if kind == "reflections":
        k, g, beta = k[:, :1].expand_as(k).clone(), torch.zeros_like(g), torch.full_like(beta, 2.0)
    if kind == "silence":
        silent = torch.ones(T, dtype=torch.bool)
        silent[:5], silent[60:70], silent[-1] = False, False, False
        q, k, v = (x.masked_fill(silent[:, None, None], 0.0) for x in (q, k, v))
    return call._replace(tensors=type(call.tensors)(q, k, v, g, beta, *rest))


ADVERSARIES = ("equal keys", "one token", "opposite keys", "reflections", "silence")


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("op", OPS)
def test_adversaries_of_the_solve(op, kind, chunk):
    """By the bounds of `calls`: powers of A grow to 20 within blocks of 8 rows (480 with beta 2), not to 2^60."""
    check(adversary(kind, op), Config(chunk=chunk))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["equal keys", "one token", "silence"])
@pytest.mark.parametrize("op", OPS)
def test_adversaries_in_fast_mode(op, kind, dtype):
    """The inverse loses `C(7, 3) = 35` roundings of its operands, all else `CASTS`; results have the size of v."""
    call = adversary(kind, op, dtype, T=64)
    o, final = run(call, fast=True)
    wanted = definition(call)
    ulp = 2.0**-11 if dtype == torch.float16 else 2.0**-7
    bound = (35 + CASTS) * ulp
    assert nmse(o, wanted.o) ** 0.5 <= bound and nmse(final, wanted.final) ** 0.5 <= bound


def test_decays_after_strong_ones_are_exact():
    """GDN: sums of log decays in two parts. One float32 number, -540, would be off by 3e-5 at every later token."""
    call = make_call(T=64, HV=1, K=32, V=32)
    g = torch.full_like(call.tensors.g, -0.03)
    g[:, 3:9] = -90.0
    call = call._replace(tensors=call.tensors._replace(g=g))
    o, final = run(call)
    wanted = definition(call)
    # 64 additions of rests below 2^-9 and products over 32 and 64 terms.
    bound = (64 * 64 * 2.0**-9 + 32**0.5 + 64**0.5 + 8) * EPS
    assert nmse(o[:, 9:], wanted.o[:, 9:]) ** 0.5 <= bound and nmse(final, wanted.final) ** 0.5 <= bound


@pytest.mark.parametrize("strongest", [-60.0, -104.0, -torch.inf])
def test_strong_and_mild_chunks_take_turns(strongest):
    """KDA: chunks that restart every 16 tokens between chunks that do not, over both borders, in a pack."""
    call = make_call(lengths=[200, 70, 64], HV=1, K=20, V=20, channel=True, gate="mild")
    g = call.tensors.g.clone()
    # Of the second chunk of the first sequence, and the tail of the second one.
    g[:, 70:90, :, 3] = -50.0
    g[:, 265:270] = strongest
    check(call._replace(tensors=call.tensors._replace(g=g)))


@pytest.mark.parametrize("lower_bound", [-0.5, -1.0, -2.0, -5.0, -6.0, -12.0, -30.0, -100.0])
def test_every_size_of_piece(lower_bound):
    """Gates at their bound over whole chunks: the largest exponents that the size of a piece allows."""
    call = make_call(T=80, HV=1, K=16, V=16, channel=True, gate="bounded", lower_bound=lower_bound)
    g = call.tensors.g.clone()
    g[..., ::2] = 30.0
    g[..., 1::4] = -30.0
    check(call._replace(tensors=call.tensors._replace(g=g)))
