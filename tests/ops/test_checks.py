"""Every refusal of `fla_npu.ops.checks` with its class and words, every legal oddity, and the Problem that results."""

import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fla_npu.errors import ShapeError
from fla_npu.ops import checks
from fla_npu.ops.problem import Options, Problem

B, T, H, HV, K, V = 2, 5, 2, 4, 3, 6
CHECKS = {
    "chunk_gdn": checks.check_chunk_gdn,
    "recurrent_gdn": checks.check_recurrent_gdn,
    "chunk_kda": checks.check_chunk_kda,
    "recurrent_kda": checks.check_recurrent_kda,
    "recurrent_kda_fwd": lambda **kwargs: checks.check_recurrent_kda_fwd(**kwargs)[0],
}
GDN = ("chunk_gdn", "recurrent_gdn")
KDA = ("chunk_kda", "recurrent_kda", "recurrent_kda_fwd")
CHUNK = ("chunk_gdn", "chunk_kda")
RECURRENT = ("recurrent_gdn", "recurrent_kda", "recurrent_kda_fwd")
ALL = GDN + KDA


def arguments(op: str, batch: int = B, length: int = T, states: int | None = None) -> dict[str, Any]:
    """A valid call."""
    rows = batch if states is None else states
    return {
        "q": torch.zeros(batch, length, H, K),
        "k": torch.zeros(batch, length, H, K),
        "v": torch.zeros(batch, length, HV, V),
        "g": torch.zeros(batch, length, HV, K) if op in KDA else torch.zeros(batch, length, HV),
        "beta": torch.zeros(batch, length, HV),
        "initial_state": torch.zeros(rows, HV, K, V),
    }


def packed(op: str, bounds: list[int]) -> dict[str, Any]:
    """A valid call with packed sequences."""
    made = arguments(op, batch=1, length=bounds[-1], states=len(bounds) - 1)
    return {**made, "cu_seqlens": torch.tensor(bounds)}


def check(op: str, base: dict[str, Any] | None = None, **overrides: Any) -> Problem:
    return CHECKS[op](**{**(arguments(op) if base is None else base), **overrides})


@dataclass(frozen=True)
class Refusal:
    ops: tuple[str, ...]
    error: type[BaseException]
    message: str
    overrides: dict[str, Any] = field(default_factory=dict)
    bounds: tuple[int, ...] | None = None
    """Of the packed sequences, if the call has any."""


zeros, ones = torch.zeros, torch.ones
A_LOG, GATE = zeros(HV), {"use_gate_in_kernel": True}

REFUSALS = {
    # What FLA refuses too.
    "both layout names": Refusal(
        ALL, ValueError, "not both", {"state_v_first": True, "transpose_state_layout": True, "initial_state": None}
    ),
    "heads of q and k": Refusal(
        ("chunk_gdn",), ValueError, "q and k must have the same number of heads", {"k": zeros(B, T, 4, K)}
    ),
    "heads of q and k, asserted": Refusal(
        ALL[1:], AssertionError, "q and k must have the same shape", {"k": zeros(B, T, 4, K)}
    ),
    "group": Refusal(ALL, ShapeError, "num_v_heads (HV=3) must be evenly divisible", {"v": zeros(B, T, 3, V)}),
    "fewer value heads": Refusal(ALL, ShapeError, "must be evenly divisible", {"v": zeros(B, T, 1, V)}),
    "head_first": Refusal(("chunk_gdn",), DeprecationWarning, "head_first has been removed", {"head_first": False}),
    "chunk size, GDN": Refusal(("chunk_gdn",), ValueError, "`chunk_size` must be 16, 32, or 64", {"chunk_size": 128}),
    "chunk size, KDA": Refusal(("chunk_kda",), ValueError, "`chunk_size` must be either 32 or 64", {"chunk_size": 16}),
    "context parallel": Refusal(CHUNK, NotImplementedError, "cp_context must be None", {"cp_context": object()}),
    "packed batch": Refusal(
        ALL, ValueError, "batch size is expected to be 1 rather than 2", {"cu_seqlens": torch.tensor([0, T])}
    ),
    "packed states": Refusal(
        ALL, ValueError, "number of initial states", {"initial_state": zeros(3, HV, K, V)}, bounds=(0, 2, 5)
    ),
    "state dtype": Refusal(
        ("chunk_kda",), AssertionError, "initial_state must be in float32", {"initial_state": zeros(B, HV, K, V).half()}
    ),
    "no A_log, chunk GDN": Refusal(("chunk_gdn",), AssertionError, "`A_log` must be provided", GATE),
    "no A_log": Refusal(ALL, ValueError, "`A_log` must be provided", GATE),
    "no g for the gate": Refusal(
        ("recurrent_gdn",), ValueError, "`g`, the gate's logits, must be", {**GATE, "A_log": A_LOG, "g": None}
    ),
    "safe gate without bound": Refusal(
        ("chunk_kda",), ValueError, "`lower_bound` must be given", {**GATE, "A_log": A_LOG, "safe_gate": True}
    ),
    "unsafe bound": Refusal(
        ("chunk_kda",), ValueError, "safe range [-5, 0), got -6", {**GATE, "lower_bound": -6, "safe_gate": True}
    ),
    "neg_eigval": Refusal(
        ALL,
        ValueError,
        "`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`",
        {"allow_neg_eigval": True},
    ),
    "g of a KDA op": Refusal(
        KDA, AssertionError, "g must have shape [B, T, HV, K]=[2, 5, 4, 3]", {"g": zeros(B, T, HV)}
    ),
    "beta": Refusal(
        ALL, AssertionError, "beta must have shape [B, T, HV]=[2, 5, 4], got [2, 5, 2]", {"beta": zeros(B, T, H)}
    ),
    "intermediate states": Refusal(
        ("chunk_kda",), AssertionError, "only allowed in inference mode", {"return_intermediate_states": True}
    ),
    "graph padding": Refusal(
        ("chunk_kda",),
        AssertionError,
        "max_num_seqs + 1 = 5 entries, got 3",
        {"use_graph": True, "max_num_seqs": 4},
        bounds=(0, 2, 5),
    ),
    "out": Refusal(("recurrent_kda_fwd",), AssertionError, "out must have the shape of v", {"out": zeros(B, T, H, V)}),
    "in place": Refusal(
        ("recurrent_kda_fwd",), AssertionError, "inplace_final_state=True needs initial_state", {"initial_state": None}
    ),
    # 1: ranks and (B, T).
    "rank of q": Refusal(ALL, ShapeError, "q must have shape [B, T, H, K], got [2, 5, 6]", {"q": zeros(B, T, H * K)}),
    "rank of v": Refusal(ALL, ShapeError, "v must have shape [B, T, HV, V], got [2, 5]", {"v": zeros(B, T)}),
    "T of v": Refusal(
        ALL, ShapeError, "v must have shape [B, T, HV, V] with B=2 and T=5", {"v": zeros(B, T + 1, HV, V)}
    ),
    "B of v": Refusal(ALL, ShapeError, "v must have shape [B, T, HV, V] with B=2 and T=5", {"v": zeros(1, T, HV, V)}),
    "T of k": Refusal(ALL, ShapeError, "q and k must have the same shape", {"k": zeros(B, T + 1, H, K)}),
    "K of k": Refusal(ALL, ShapeError, "q and k must have the same shape", {"k": zeros(B, T, H, K + 1)}),
    "T of beta": Refusal(ALL, ShapeError, "beta must have shape", {"beta": zeros(B, 1, HV)}),
    "no key channels": Refusal(
        ALL, ShapeError, "K and V must be at least 1", {"q": zeros(B, T, H, 0), "k": zeros(B, T, H, 0)}
    ),
    "no heads": Refusal(ALL, ShapeError, "both at least 1", {"q": zeros(B, T, 0, K), "k": zeros(B, T, 0, K)}),
    # 3: gates.
    "g of a GDN op": Refusal(
        GDN, ShapeError, "g must have shape [B, T, HV]=[2, 5, 4], got [2, 5, 4, 3]", {"g": zeros(B, T, HV, K)}
    ),
    "g per query head": Refusal(GDN, ShapeError, "g must have shape", {"g": zeros(B, T, H)}),
    "gk": Refusal(("recurrent_gdn",), ShapeError, "gk must have shape [B, T, HV, K]", {"gk": zeros(B, T, HV, V)}),
    "gv": Refusal(("recurrent_gdn",), ShapeError, "gv must have shape [B, T, HV, V]", {"gv": zeros(B, T, HV, K)}),
    "only gk": Refusal(
        ("recurrent_gdn",), ShapeError, "g must have shape [B, T, HV, K]", {"g": None, "gk": zeros(B, T, H, K)}
    ),
    "beta per channel": Refusal(CHUNK, ShapeError, "beta must have shape [B, T, HV]=", {"beta": zeros(B, T, HV, V)}),
    "beta per wrong channel": Refusal(
        RECURRENT, ShapeError, "beta must have shape [B, T, HV, V]=", {"beta": zeros(B, T, HV, K)}
    ),
    # 4: states.
    "state layout": Refusal(
        ALL, ShapeError, "it looks V-first: pass state_v_first=True", {"initial_state": zeros(B, HV, V, K)}
    ),
    "state layout, V first": Refusal(
        ALL, ShapeError, "it looks K-first: pass state_v_first=False", {"state_v_first": True}
    ),
    "state rows": Refusal(
        ALL,
        ShapeError,
        "initial_state must have shape [N, HV, K, V]=[2, 4, 3, 6]",
        {"initial_state": zeros(1, HV, K, V)},
    ),
    "state heads": Refusal(ALL, ShapeError, "initial_state must have shape", {"initial_state": zeros(B, H, K, V)}),
    "state rank": Refusal(ALL, ShapeError, "initial_state must have shape", {"initial_state": torch.tensor(0.0)}),
    "state of integers": Refusal(
        ("chunk_gdn", *RECURRENT),
        ShapeError,
        "initial_state must be float16, bfloat16",
        {"initial_state": zeros(B, HV, K, V).long()},
    ),
    "state device": Refusal(
        ALL, ShapeError, "but initial_state is on meta", {"initial_state": zeros(B, HV, K, V, device="meta")}
    ),
    # 5: cu_seqlens.
    "bounds of one entry": Refusal(
        ALL, ShapeError, "shape [N + 1] with N >= 1", {"cu_seqlens": torch.tensor([0])}, bounds=(0, 5)
    ),
    "bounds of floats": Refusal(
        ALL, ShapeError, "must be an int32 or int64 tensor", {"cu_seqlens": torch.tensor([0.0, 5.0])}, bounds=(0, 5)
    ),
    "bounds of two dimensions": Refusal(
        ALL, ShapeError, "shape [N + 1]", {"cu_seqlens": torch.tensor([[0, 5]])}, bounds=(0, 5)
    ),
    "bounds in a list": Refusal(
        ALL, TypeError, "cu_seqlens must be a torch.Tensor, got list [0, 5]", {"cu_seqlens": [0, 5]}, bounds=(0, 5)
    ),
    "late start": Refusal(
        ALL,
        ValueError,
        "must start at 0 and end at T=5, got 1 and 5",
        {"cu_seqlens": torch.tensor([1, 5])},
        bounds=(0, 5),
    ),
    "early end": Refusal(
        ALL,
        ValueError,
        "must start at 0 and end at T=5, got 0 and 4",
        {"cu_seqlens": torch.tensor([0, 4])},
        bounds=(0, 5),
    ),
    "decrease": Refusal(
        ALL,
        ValueError,
        "must not decrease, got [0, 4, 3, 5]",
        {"cu_seqlens": torch.tensor([0, 4, 3, 5])},
        bounds=(0, 4, 4, 5),
    ),
    "host copy alone": Refusal(
        CHUNK, ValueError, "cu_seqlens_cpu is a host copy of cu_seqlens", {"cu_seqlens_cpu": torch.tensor([0, 5])}
    ),
    "host copy of another": Refusal(
        CHUNK, ValueError, "must hold the same values", {"cu_seqlens_cpu": torch.tensor([0, 4, 5])}, bounds=(0, 3, 5)
    ),
    "host copy of another size": Refusal(
        CHUNK, ShapeError, "must be a CPU copy", {"cu_seqlens_cpu": torch.tensor([0, 5])}, bounds=(0, 3, 5)
    ),
    "host copy elsewhere": Refusal(
        CHUNK,
        ShapeError,
        "must be a CPU copy",
        {"cu_seqlens_cpu": torch.zeros(3, dtype=torch.long, device="meta")},
        bounds=(0, 3, 5),
    ),
    # 6, 7: gate parameters.
    "A_log": Refusal(ALL, ShapeError, "A_log must have HV=4 elements, got shape [2]", {**GATE, "A_log": zeros(H)}),
    "dt_bias, GDN": Refusal(
        GDN, ShapeError, "dt_bias must have HV=4 elements", {**GATE, "A_log": A_LOG, "dt_bias": zeros(HV * K)}
    ),
    "dt_bias, KDA": Refusal(
        KDA, ShapeError, "dt_bias must have HV*K=12 elements", {**GATE, "A_log": A_LOG, "dt_bias": zeros(HV)}
    ),
    "A_log of integers": Refusal(ALL, ShapeError, "A_log must be float16", {**GATE, "A_log": zeros(HV).long()}),
    "A_log device": Refusal(ALL, ShapeError, "but A_log is on meta", {**GATE, "A_log": zeros(HV, device="meta")}),
    "positive bound": Refusal(
        KDA, ValueError, "`lower_bound` must be negative, got 0.0", {**GATE, "A_log": A_LOG, "lower_bound": 0.0}
    ),
    # 8: dtypes and devices.
    "mixed dtypes": Refusal(ALL, ShapeError, "q, k and v must have one dtype", {"v": zeros(B, T, HV, V).half()}),
    "integers": Refusal(
        ALL,
        ShapeError,
        "q must be float16, bfloat16, float32 or float64, got torch.int64",
        {"q": zeros(B, T, H, K).long()},
    ),
    "booleans": Refusal(ALL, ShapeError, "beta must be float16", {"beta": zeros(B, T, HV).bool()}),
    "integer g": Refusal(GDN, ShapeError, "g must be float16", {"g": zeros(B, T, HV).int()}),
    "devices": Refusal(
        ALL,
        ShapeError,
        "all tensors must be on the device of q, cpu, but v is on meta",
        {"v": zeros(B, T, HV, V, device="meta")},
    ),
    "device of beta": Refusal(ALL, ShapeError, "but beta is on meta", {"beta": zeros(B, T, HV, device="meta")}),
    # 12: pools of states.
    "slots of one column": Refusal(
        ("recurrent_kda_fwd",),
        ValueError,
        "one slot per token, so a shape [N, S] with S >= 5",
        {"ssm_state_indices": torch.tensor([0, 1])},
    ),
    "slots of floats": Refusal(
        ("recurrent_kda_fwd",), ShapeError, "ssm_state_indices must be an int32", {"ssm_state_indices": zeros(B, T)}
    ),
    "slots of too few": Refusal(
        ("recurrent_kda_fwd",), ShapeError, "of shape [N]=[2]", {"ssm_state_indices": zeros(1, T).int()}
    ),
    "slots too large": Refusal(
        ("recurrent_kda_fwd",), ValueError, "between 0 and 1", {"ssm_state_indices": torch.full((B, T), 2)}
    ),
    "slots negative": Refusal(
        ("recurrent_kda_fwd",), ValueError, "between 0 and 1", {"ssm_state_indices": torch.full((B, T), -1)}
    ),
    "slots without pool": Refusal(
        ("recurrent_kda_fwd",),
        ShapeError,
        "ssm_state_indices needs initial_state",
        {"ssm_state_indices": zeros(B, T).int(), "initial_state": None, "inplace_final_state": False},
    ),
    "slots of tokens, copied": Refusal(
        ("recurrent_kda_fwd",),
        ValueError,
        "needs inplace_final_state=True",
        {"ssm_state_indices": zeros(B, T).int(), "inplace_final_state": False},
    ),
    "accepted without slots": Refusal(
        ("recurrent_kda_fwd",), ValueError, "needs ssm_state_indices", {"num_accepted_tokens": ones(B).int()}
    ),
    "accepted too many": Refusal(
        ("recurrent_kda_fwd",),
        ValueError,
        "num_accepted_tokens must be between 1 and 5, got 6",
        {"ssm_state_indices": zeros(B, T).int(), "num_accepted_tokens": torch.tensor([1, 6])},
    ),
    "accepted of floats": Refusal(
        ("recurrent_kda_fwd",),
        ShapeError,
        "num_accepted_tokens must be an int32",
        {"ssm_state_indices": zeros(B, T).int(), "num_accepted_tokens": ones(B)},
    ),
    # 13: chunk indices.
    "chunk indices": Refusal(
        ("chunk_gdn",),
        ShapeError,
        "[NT, 2]=[3, 2] for chunk_size=16",
        {"chunk_indices": zeros(2, 2).int(), "chunk_size": 16},
        bounds=(0, 17, 20),
    ),
    "chunk indices alone": Refusal(
        ("chunk_gdn",), ValueError, "pass cu_seqlens too", {"chunk_indices": zeros(1, 2).int()}
    ),
    # Types.
    "no tensor": Refusal(ALL, TypeError, "q must be a torch.Tensor, got NoneType None", {"q": None}),
    "beta no tensor": Refusal(CHUNK + KDA, TypeError, "beta must be a torch.Tensor, got float 0.5", {"beta": 0.5}),
    "g no tensor": Refusal(CHUNK + KDA, TypeError, "g must be a torch.Tensor, got NoneType", {"g": None}),
    "state no tensor": Refusal(
        ALL, TypeError, "initial_state must be a torch.Tensor, got bool True", {"initial_state": True}
    ),
    "scale": Refusal(ALL, TypeError, "scale must be a number or None, got str '0.5'", {"scale": "0.5"}),
    "scale tensor": Refusal(
        ALL, TypeError, "scale must be a number or None, got a torch.float32 tensor", {"scale": ones(2)}
    ),
    "flag": Refusal(
        ALL,
        TypeError,
        "use_qk_l2norm_in_kernel must be a bool, got a torch.float32 tensor",
        {"use_qk_l2norm_in_kernel": ones(2)},
    ),
}


@pytest.mark.parametrize(
    ("op", "refusal"), [pytest.param(op, case, id=f"{name}-{op}") for name, case in REFUSALS.items() for op in case.ops]
)
def test_refusal(op: str, refusal: Refusal):
    base = arguments(op) if refusal.bounds is None else packed(op, list(refusal.bounds))
    with pytest.raises(refusal.error, match=re.escape(refusal.message)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(op, base, **refusal.overrides)


def test_refusals_that_need_a_device_or_a_mode():
    on_meta = {name: x.to("meta") for name, x in arguments("chunk_kda").items()}
    with pytest.raises(NotImplementedError, match="use_graph=True is not supported on meta"):
        check("chunk_kda", on_meta, use_graph=True)
    with torch.inference_mode(), pytest.raises(AssertionError, match="needs disable_recompute=False"):
        check("chunk_kda", return_intermediate_states=True, disable_recompute=True)


@pytest.mark.parametrize(
    ("op", "overrides", "first"),
    [
        ("chunk_gdn", {"k": zeros(B, T, 4, K), "chunk_size": 1, "head_first": True}, "same number of heads"),
        ("chunk_gdn", {"head_first": True, "chunk_size": 1}, "head_first"),
        ("chunk_gdn", {"chunk_size": 1, "cp_context": 1}, "chunk_size"),
        ("chunk_gdn", {"cp_context": 1, "cu_seqlens": torch.tensor([0, 5])}, "cp_context"),
        ("chunk_gdn", {"cu_seqlens": torch.tensor([0, 5]), **GATE}, "batch size"),
        ("chunk_gdn", {**GATE, "allow_neg_eigval": True}, "A_log"),
        ("chunk_kda", {"cu_seqlens": torch.tensor([0, 5]), "initial_state": zeros(1, HV, K, V).half()}, "batch size"),
        ("chunk_kda", {"initial_state": zeros(B, HV, K, V).half(), **GATE}, "float32"),
        ("chunk_kda", {**GATE, "chunk_size": 1}, "A_log"),
        ("chunk_kda", {**GATE, "chunk_size": 1, "safe_gate": True, "lower_bound": 1}, "chunk_size"),
        ("chunk_kda", {**GATE, "safe_gate": True, "lower_bound": 1, "allow_neg_eigval": True}, "safe range"),
        ("chunk_kda", {"allow_neg_eigval": True, "k": zeros(B, T, 4, K)}, "allow_neg_eigval"),
        ("chunk_kda", {"k": zeros(B, T, 4, K), "g": zeros(1)}, "q and k"),
        ("chunk_kda", {"g": zeros(1), "beta": zeros(1)}, "g must have"),
        ("recurrent_gdn", {"cu_seqlens": torch.tensor([0, 5]), **GATE}, "batch size"),
        ("recurrent_gdn", {**GATE, "allow_neg_eigval": True}, "A_log"),
        ("recurrent_kda", {"cu_seqlens": torch.tensor([0, 5]), "allow_neg_eigval": True}, "batch size"),
    ],
)
def test_order_of_checks_is_flas(op: str, overrides: dict[str, Any], first: str):
    with pytest.raises((ValueError, NotImplementedError, DeprecationWarning), match=first):
        check(op, **overrides)


@pytest.mark.parametrize(
    ("op", "overrides"),
    [
        pytest.param(op, overrides, id=f"{name}-{op}")
        for name, (ops, overrides) in {
            "no state": (("chunk_gdn", "recurrent_gdn", "chunk_kda", "recurrent_kda"), {"initial_state": None}),
            "state of bfloat16": (("chunk_gdn", *RECURRENT), {"initial_state": zeros(B, HV, K, V).bfloat16()}),
            "g in another dtype": (GDN, {"g": zeros(B, T, HV).bfloat16()}),
            "beta in another dtype": (ALL, {"beta": zeros(B, T, HV).half()}),
            "V first": (ALL, {"state_v_first": True, "initial_state": zeros(B, HV, V, K)}),
            "beta per channel": (RECURRENT, {"beta": zeros(B, T, HV, V)}),
            "no beta": (("recurrent_gdn",), {"beta": None}),
            "no g": (("recurrent_gdn",), {"g": None}),
            "integer scale": (ALL, {"scale": 1}),
            "A_log of four dimensions": (ALL, {**GATE, "A_log": zeros(1, 1, HV, 1)}),
            "no A_log but a bound": (KDA, {**GATE, "lower_bound": -5}),
            "unsafe bound without safe_gate": (KDA, {**GATE, "A_log": A_LOG, "lower_bound": -50.0}),
            "unused bound": (KDA, {"lower_bound": 3.0}),
            "safe gate outside": (("chunk_kda",), {"safe_gate": True}),
            "A_log without gate": (ALL, {"A_log": zeros(7), "dt_bias": "unread"}),
            "small chunk": (("chunk_gdn",), {"chunk_size": 16}),
            "ignored by the recurrent ops": (RECURRENT[:2], {"chunk_size": 7, "head_first": False}),
            "ignored by KDA": (("recurrent_kda",), {"safe_gate": True}),
            "graph on the CPU": (("chunk_kda",), {"use_graph": True}),
            "graph padding without bounds": (("chunk_kda",), {"use_graph": True, "max_num_seqs": 9}),
            "equal group": (ALL, {"q": zeros(B, T, HV, K), "k": zeros(B, T, HV, K)}),
            "views": (ALL, {"q": zeros(B, H, K, T).permute(0, 3, 1, 2), "v": zeros(1, 1, HV, V).expand(B, T, HV, V)}),
        }.items()
        for op in ops
    ],
)
def test_legal(op: str, overrides: dict[str, Any]):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(op, **overrides)


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize(
    ("batch", "length", "key_dim", "dtype"),
    [(2, 0, K, torch.float32), (0, 5, K, torch.float32), (1, 1, 300, torch.float16), (1, 2, 1, torch.float64)],
)
def test_legal_sizes(op: str, batch: int, length: int, key_dim: int, dtype: torch.dtype):
    base = {
        "q": torch.zeros(batch, length, H, key_dim, dtype=dtype),
        "k": torch.zeros(batch, length, H, key_dim, dtype=dtype),
        "v": torch.zeros(batch, length, HV, V, dtype=dtype),
        "g": torch.zeros(batch, length, HV, key_dim) if op in KDA else torch.zeros(batch, length, HV),
        "beta": torch.zeros(batch, length, HV),
        "initial_state": torch.zeros(batch, HV, key_dim, V),
    }
    assert check(op, base).options.scale == key_dim**-0.5


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bounds", [(0, 5), (0, 0, 5, 5), (0, 0), (0, 1, 2, 3)])
def test_bounds_become_host_integers(op: str, dtype: torch.dtype, bounds: tuple[int, ...]):
    base = packed(op, list(bounds))
    base["cu_seqlens"] = base["cu_seqlens"].to(dtype)
    assert tuple(check(op, base).cu_seqlens) == bounds
    assert check(op).cu_seqlens is None


@pytest.mark.parametrize("op", CHUNK)
def test_host_copy_of_bounds_spares_the_device(op: str):
    base = packed(op, [0, 2, 5])
    base["cu_seqlens"] = base["cu_seqlens"].to("meta")  # its values cannot be read
    assert tuple(check(op, base, cu_seqlens_cpu=torch.tensor([0, 2, 5])).cu_seqlens) == (0, 2, 5)


@pytest.mark.parametrize("op", ["chunk_kda", "recurrent_kda"])
def test_name_of_the_bounds_in_transformers(op: str):
    base = packed(op, [0, 2, 5])
    bounds = base.pop("cu_seqlens")
    assert tuple(check(op, base, cu_seq_lens_q=bounds).cu_seqlens) == (0, 2, 5)
    both = check(op, base, cu_seqlens=bounds, cu_seq_lens_q=torch.tensor([0, 5]))
    assert tuple(both.cu_seqlens) == (0, 2, 5)


def test_chunk_indices_are_checked_and_dropped():
    indices = torch.tensor([[0, 0], [0, 1], [1, 0]])
    assert check("chunk_gdn", packed("chunk_gdn", [0, 17, 20]), chunk_indices=indices, chunk_size=16)


def test_options_say_what_was_asked_for():
    gate = {**GATE, "A_log": A_LOG, "use_beta_sigmoid_in_kernel": True}
    problem = check("chunk_gdn", **gate, use_qk_l2norm_in_kernel=True, output_final_state=True, chunk_size=32, scale=2)
    assert problem.options == Options(
        decay="scalar",
        scale=2.0,
        qk_l2norm=True,
        gate="softplus",
        beta_sigmoid=True,
        output_final_state=True,
        chunk_size=32,
    )
    problem = check("chunk_kda", **gate, allow_neg_eigval=True, lower_bound=-5, disable_recompute=True)
    assert problem.options == Options(
        decay="channel",
        scale=K**-0.5,
        gate="bounded",
        lower_bound=-5.0,
        beta_sigmoid=True,
        beta_scale=2.0,
        keep_states=True,
    )
    with torch.inference_mode():
        assert check("chunk_kda", return_intermediate_states=True).options.return_intermediate_states
    assert check("recurrent_kda_fwd").options.output_final_state
    assert not check("recurrent_kda_fwd", inplace_final_state=False).options.output_final_state


def test_decays_of_recurrent_gdn():
    gk, gv = zeros(B, T, HV, K), zeros(B, T, HV, V)
    both = check("recurrent_gdn", gk=gk, gv=gv)
    assert both.options.decay == "scalar" and both.tensors.gk is gk and both.tensors.gv is gv
    only_gk = check("recurrent_gdn", g=None, gk=gk)
    assert only_gk.options.decay == "channel" and only_gk.tensors.g is gk and only_gk.tensors.gk is None
    assert check("recurrent_gdn", g=None).options.decay == "none"


def test_missing_beta_is_one_per_value_head():
    beta = check("recurrent_gdn", beta=None).tensors.beta
    assert torch.equal(beta, ones(B, T, HV))


@pytest.mark.parametrize("op", ALL)
def test_gate_parameters_arrive_flat_and_attached(op: str):
    A_log = zeros(1, 1, HV, 1, requires_grad=True)
    size = HV if op in GDN else HV * K
    tensors = check(op, **GATE, A_log=A_log, dt_bias=zeros(size)).tensors
    assert tensors.A_log.shape == (HV,) and tensors.A_log.requires_grad
    assert tensors.dt_bias.shape == (size,)
    unused = check(op, A_log=A_log).tensors
    assert unused.A_log is None and unused.dt_bias is None


@pytest.mark.parametrize("op", ALL)
def test_old_name_of_the_layout(op: str):
    base = arguments(op)
    base["initial_state"] = zeros(B, HV, V, K)
    with pytest.warns(DeprecationWarning, match="use `state_v_first`") as caught:
        assert check(op, base, transpose_state_layout=True).options.state_v_first
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning):
        assert not check(op, transpose_state_layout=False).options.state_v_first


@pytest.mark.parametrize("op", ALL)
def test_unknown_argument_warns_once(op: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "_warned_names", set())
    with pytest.warns(UserWarning, match="ignores the argument `use_gate_in_kernal`"):
        check(op, use_gate_in_kernal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(op, use_gate_in_kernal=True)


@pytest.mark.parametrize("op", ["recurrent_gdn", "chunk_kda", "recurrent_kda"])
def test_head_first_is_worth_a_warning(op: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "_warned_names", set())
    with pytest.warns(UserWarning, match="head_first"):
        check(op, head_first=True)


@pytest.mark.parametrize("op", ALL)
def test_tensors_pass_through_untouched(op: str):
    made = arguments(op)
    before = {name: x.clone() for name, x in made.items()}
    tensors = check(op, made).tensors
    for name, x in made.items():
        assert getattr(tensors, name) is x
        assert x._version == 0 and torch.equal(x, before[name])


def test_safe_gate_values_are_checked_on_request(monkeypatch: pytest.MonkeyPatch):
    outside = torch.full((B, T, HV, K), -6.0)
    check("chunk_kda", g=outside, safe_gate=True)
    monkeypatch.setenv("FLA_NPU_CHECK_VALUES", "1")
    with pytest.raises(ValueError, match=re.escape("promises g in [-5, 0], got [-6.0, -6.0]")):
        check("chunk_kda", g=outside, safe_gate=True)
    check("chunk_kda", g=outside / 2, safe_gate=True)


def test_pool_of_states():
    base = packed("recurrent_kda_fwd", [0, 1, 1, 3])
    base["initial_state"] = zeros(9, HV, K, V)
    slots = torch.tensor([[7, -1], [-1, -1], [3, 5]], dtype=torch.int32)
    _, pool = checks.check_recurrent_kda_fwd(**base, ssm_state_indices=slots)
    assert pool is not None and pool.slots == checks.Slots(load=[7, -1, 3], store=[[7], [], [3, 5]])
    _, pool = checks.check_recurrent_kda_fwd(
        **base, ssm_state_indices=slots, num_accepted_tokens=torch.tensor([1, 9, 2])
    )
    assert pool is not None and pool.slots.load == [7, -1, 5]
    single = {**arguments("recurrent_kda_fwd", batch=2, length=1), "initial_state": zeros(9, HV, K, V)}
    problem, pool = checks.check_recurrent_kda_fwd(
        **single, ssm_state_indices=torch.tensor([8, 0]), inplace_final_state=False
    )
    assert pool is not None and pool.slots == checks.Slots(load=[8, 0], store=[[8], [0]])
    assert problem.lengths == [1, 1]
