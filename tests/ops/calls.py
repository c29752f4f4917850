"""Calls of the public ops as keyword arguments, what they should give in float64, and how far off they may be.

`expected` reads the public arguments on its own: formulas of the gates, norms and sigmoids are written out here, and
the recurrence is the token loop, whose correctness `test_recurrence.py` shows.
"""

from typing import Any

import torch

from fla_npu.ops import chunk_gated_delta_rule, chunk_kda, fused_recurrent_gated_delta_rule, fused_recurrent_kda
from fla_npu.ops.common.recurrence import delta_recurrence, packed_delta_recurrence
from fla_npu.testing import make_inputs, nmse

OPS = {
    "chunk_gdn": chunk_gated_delta_rule,
    "fused_recurrent_gdn": fused_recurrent_gated_delta_rule,
    "chunk_kda": chunk_kda,
    "fused_recurrent_kda": fused_recurrent_kda,
}
CHUNKED = ("chunk_gdn", "chunk_kda")
RECURRENT = ("fused_recurrent_gdn", "fused_recurrent_kda")

Arguments = dict[str, Any]

FLOAT32_NMSE = 1e-11
"""Of what is computed in float32. Its unit roundoff is 6e-8, whose square is 3.6e-15: this allows for an error of 50
roundings. A result is behind about sqrt(64 + 128) of them in the sums of a chunk, each amplified by the solve; the
exponents of `ReferencedDecay`, up to 120 in size, add a relative error of 1.4e-6, the square of which is 2e-12."""

GRADIENT_NMSE = 10 * FLOAT32_NMSE
"""A gradient passes through the chunk twice, forward to the states and back, with a solve each time: ten times what is
allowed for o."""

DECAY_GRADIENT_NMSE = 1000 * GRADIENT_NMSE
"""The gradient of a decay is a difference of sums over the pairs of tokens that it lies between, read and written, and
those of gate parameters add up such differences of all tokens. Where a sum of n terms of random signs is left of them
it is sqrt(n) times smaller than its terms and their errors, so that the NMSE is n times larger; n is up to 32 * 32
pairs or T = 300 tokens here."""


def storage_nmse(reference: torch.Tensor, dtype: torch.dtype) -> float:
    """Largest NMSE that rounding to `dtype` can cause: half a unit in the last place of each element, or half the
    spacing of the denormal numbers."""
    info = torch.finfo(dtype)
    power = reference.double().square().sum().item()
    denormal = reference.numel() * (info.smallest_normal * info.eps / 2) ** 2
    return (info.eps / 2) ** 2 + (denormal / power if power else 0.0)


def assert_accurate(
    what: str,
    x: torch.Tensor,
    reference: torch.Tensor,
    bound: float = FLOAT32_NMSE,
    *,
    seen: str = "",
    terms: torch.Tensor | None = None,
) -> None:
    """x has the shape of the reference, no NaN or infinity, and an NMSE of at most `bound` plus that of its dtype.

    Args:
        terms: as large as what the reference is a sum of. Where terms cancel their rounding does not, so that the error
            counts in proportion to them where the reference is smaller.
    """
    assert x.shape == reference.shape, f"{what}: shape {list(x.shape)} instead of {list(reference.shape)}"
    assert x.isfinite().all(), f"{what} is not finite {seen}"
    error = nmse(x, reference)
    if terms is not None and (power := reference.double().square().sum().item()):
        bound *= max(1.0, terms.double().square().sum().item() / power)
    # Root mean squares add up, their squares do not.
    allowed = (bound**0.5 + storage_nmse(reference, x.dtype) ** 0.5) ** 2
    assert error <= allowed, f"{what}: NMSE {error:.3g} above {allowed:.3g} {seen}"


def make_call(
    op: str,
    case: str = "ordinary",
    *,
    B: int = 1,
    T: int = 70,
    H: int = 2,
    HV: int = 4,
    K: int = 16,
    V: int = 12,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    bounds: list[int] | None = None,
    index_dtype: torch.dtype = torch.int64,
    state: bool = True,
    v_first: bool = False,
    l2norm: bool = False,
    gate: str = "none",
    beta: str = "plain",
    **options: Any,
) -> Arguments:
    """Keyword arguments of an op.

    Args:
        case: one of `fla_npu.testing.CASES`.
        bounds: of packed sequences; T is then their end and B is 1.
        gate: `none`, `softplus`, `softplus without bias`; KDA also `bounded`, `bounded without A_log`.
        beta: `plain`, `sigmoid` or `negative` eigenvalues.
        options: further arguments of the op, as they are.
    """
    if bounds is not None:
        B, T = 1, bounds[-1]
    made = make_inputs(
        case,
        B=B,
        T=T,
        H=H,
        HV=HV,
        K=K,
        V=V,
        channel=op.endswith("kda"),
        sequences=None if bounds is None else len(bounds) - 1,
        dtype=torch.float32 if dtype == torch.float64 else dtype,
        seed=seed,
    )
    call: Arguments = {"output_final_state": True, **made._asdict(), **options}
    generator = torch.Generator().manual_seed(seed + 1)
    if l2norm:
        call["use_qk_l2norm_in_kernel"] = True
        call["q"], call["k"] = 3 * call["q"], 3 * call["k"]
    if gate != "none":
        call["use_gate_in_kernel"] = True
        call["g"] = torch.randn(call["g"].shape, generator=generator)
        channels = K if op.endswith("kda") else 1
        if gate != "bounded without A_log":
            call["A_log"] = torch.rand(HV, generator=generator)
        if gate != "softplus without bias":
            call["dt_bias"] = torch.randn(HV * channels, generator=generator)
        if gate.startswith("bounded"):
            call["lower_bound"] = -5.0
    if beta != "plain":
        call["use_beta_sigmoid_in_kernel"] = True
        call["beta"] = torch.randn(call["beta"].shape, generator=generator).to(call["beta"].dtype)
        call["allow_neg_eigval"] = beta == "negative"
    if v_first:
        call["state_v_first"] = True
        call["initial_state"] = call["initial_state"].mT.contiguous()
    if not state:
        del call["initial_state"]
    if bounds is not None:
        call["cu_seqlens"] = torch.tensor(bounds, dtype=index_dtype)
    if dtype == torch.float64:
        for name, x in call.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point() and (name, op) != ("initial_state", "chunk_kda"):
                call[name] = x.double()
    return call


def run(op: str, call: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    return OPS[op](**call)


def expected(op: str, call: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state of a call in float64; differentiable, in the layout of the call."""
    got = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    q, k, v, g, beta = (got.get(name) for name in ("q", "k", "v", "g", "beta"))
    if got.get("use_qk_l2norm_in_kernel"):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if got.get("use_beta_sigmoid_in_kernel"):
        beta = (2 if got.get("allow_neg_eigval") else 1) / (1 + (-beta).exp())
    if got.get("use_gate_in_kernel"):
        a = got["A_log"].exp() if "A_log" in got else torch.ones((), dtype=torch.float64)
        a = a.view(-1, 1) if g.ndim == 4 and a.ndim else a
        x = g + got["dt_bias"].view(g.shape[2:]) if "dt_bias" in got else g
        bound = got.get("lower_bound")
        g = -a * torch.logaddexp(x, torch.zeros_like(x)) if bound is None else bound / (1 + (-a * x).exp())
    per_channel = g is not None and g.ndim == 4
    arguments: Arguments = {
        "beta": beta,
        "g": None if per_channel else g,
        "gk": g if per_channel else got.get("gk"),
        "gv": got.get("gv"),
        "scale": got.get("scale"),
        "initial_state": got.get("initial_state"),
        "state_v_first": bool(got.get("state_v_first")),
        "dtype": torch.float64,
    }
    if "cu_seqlens" in call:
        return packed_delta_recurrence(q, k, v, cu_seqlens=call["cu_seqlens"].tolist(), **arguments)
    return delta_recurrence(q, k, v, **arguments)


def check(op: str, call: Arguments, bound: float = FLOAT32_NMSE) -> None:
    """Run a call and compare it with `expected`: shapes, dtypes, values."""
    o, state = run(op, call)
    want_o, want_state = expected(op, call)
    assert o.dtype == call["q"].dtype
    # What q reads is a sum of K terms, which cancel where q and all keys happen to be orthogonal. They are as large as
    # those that k reads, a sum of K terms of one sign.
    along_k, _ = expected(op, {**call, "q": call["k"]})
    assert_accurate("o", o, want_o, bound, terms=along_k / call["q"].shape[-1] ** 0.5)
    if not call.get("output_final_state"):
        assert state is None
        return
    assert state is not None and state.dtype == torch.float32
    assert_accurate("final state", state, want_state, bound)
