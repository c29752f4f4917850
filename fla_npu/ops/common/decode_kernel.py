# mypy: allow-untyped-defs, allow-incomplete-defs
"""The recurrence of `recurrence.py` token by token on the vector cores: decoding, and sequences of a few tokens.

A task is a sequence, a value head and a tile of its value channels. Columns of the state do not depend on one another,
so a tile's state `K x BV` stays on core over all tokens, in float32, and is read and written once. Everything between
the caller's tensors and the recurrence happens on the way: L2 norm, gate, sigmoid, scale. Matrix units have no part in
it: a token is a few matrix-vector products.

States come from and go to where the caller wants them: `[N, HV, K, V]` or V-first, in place or not, or slots of a pool.
The kernel trusts its arguments (`ops/checks.py` has seen them) except for slots, whose values the host cannot see
without waiting for the device: a sequence whose slot is none of the pool (servers pad with -1) is left alone, as one
without tokens is.
"""

import torch
import triton
import triton.language as tl

from fla_npu.compiler.build import KernelBuild
from fla_npu.ops.common.ascend import get_element, launch_options, vector_core_count
from fla_npu.ops.common.gate_kernel import log_decay, step_size
from fla_npu.ops.common.prepare import L2NORM_EPS
from fla_npu.ops.problem import Options, Tensors

# Elements of a state tile: 32 KiB in float32. About four tiles are alive at a time in 192 KiB.
TILE = 8192

# Narrower tiles leave the vector unit idle and read state rows in pieces below 64 bytes.
MIN_TILE_VALUES = 16

# With double buffering the load of the next task's state may pass the store of this one's, and a pool's slots are
# read and written in one launch.
OPTIONS = {"multibuffer": False}

# Arguments that change from call to call: a compilation for each value, or for multiples of 16, would be a waste.
_NUMBERS = [
    "N",
    "T",
    "slots",
    "q_batch",
    "q_token",
    "q_head",
    "k_batch",
    "k_token",
    "k_head",
    "v_batch",
    "v_token",
    "v_head",
    "g_batch",
    "g_token",
    "beta_batch",
    "beta_token",
    "index_row",
    "initial_row",
    "final_row",
]

_EPS = tl.constexpr(L2NORM_EPS)


@triton.jit
def one(pointer):
    """The number at an address as the first of 8 lanes, float32, the others 0.

    A formula of such lanes stays on the vector unit; one of a scalar goes back and forth between it and the scalar unit
    at every exponential and division.
    """
    lane = tl.arange(0, 8)
    return tl.load(pointer + lane, mask=lane < 1, other=0.0).to(tl.float32)


@triton.jit
def unit(x):
    """A vector over its norm."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + _EPS)


@triton.jit
def along_keys(x, V_FIRST: tl.constexpr):
    """A vector `[K]` shaped to be broadcast over a state tile."""
    if V_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def along_values(x, V_FIRST: tl.constexpr):
    """A vector `[V]` shaped to be broadcast over a state tile."""
    if V_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit(do_not_specialize=_NUMBERS)
def recurrent_kernel(
    q,
    k,
    v,
    g,
    gk,
    gv,
    beta,
    A_log,
    dt_bias,
    initial,
    final,
    indices,
    accepted,
    cu_seqlens,
    o,
    N,
    T,
    slots,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    g_batch,
    g_token,
    beta_batch,
    beta_token,
    index_row,
    initial_row,
    final_row,
    scale,
    lower_bound,
    beta_scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    GATE: tl.constexpr,
    HAS_GK: tl.constexpr,
    HAS_GV: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    L2NORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    BETA_PER_VALUE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    V_FIRST: tl.constexpr,
    STORE: tl.constexpr,
    POOLED: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Shapes are those of `problem.Tensors`.

    STORE: what becomes of states: `none`, `final` (the last goes to row n of `final`), or `slots` (the one after token
    t goes to slot `indices[n, t]` of `final`). POOLED: states come from slots of `initial`, which are `slots` many.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    GROUP: tl.constexpr = HV // H
    ROW: tl.constexpr = K if V_FIRST else V
    kk = tl.arange(0, BK)
    k_mask = kk < K
    for task in range(tl.program_id(0), N * (HV * TILES), tl.num_programs(0)):
        first = task % TILES * BV
        head = task // TILES % HV
        n = task // (HV * TILES)
        key_head = head // GROUP
        vv = first + tl.arange(0, BV)
        v_mask = vv < V
        if VARLEN:
            bos = tl.load(cu_seqlens + n).to(tl.int64)
            length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - bos).to(tl.int32)
            o_token = bos
            q_start = q + bos * q_token
            k_start = k + bos * k_token
            v_start = v + bos * v_token
            beta_start = beta + bos * beta_token
        else:
            batch = tl.cast(n, tl.int64)
            length = T
            o_token = batch * T
            q_start = q + batch * q_batch
            k_start = k + batch * k_batch
            v_start = v + batch * v_batch
            beta_start = beta + batch * beta_batch
        q_start += tl.cast(key_head, tl.int64) * q_head
        k_start += tl.cast(key_head, tl.int64) * k_head
        v_start += tl.cast(head, tl.int64) * v_head

        row = tl.cast(n, tl.int64)
        alive = True
        if POOLED:
            column = 0
            if accepted is not None:
                column = tl.load(accepted + n).to(tl.int32) - 1
            alive = (length > 0) & (column >= 0) & (column < index_row)
            row = tl.load(indices + n * index_row + tl.maximum(tl.minimum(column, index_row - 1), 0)).to(tl.int64)
            alive = alive & (row >= 0) & (row < slots)
        if V_FIRST:
            at = vv[:, None] * ROW + kk[None, :]
            tile_mask = v_mask[:, None] & k_mask[None, :]
        else:
            at = kk[:, None] * ROW + vv[None, :]
            tile_mask = k_mask[:, None] & v_mask[None, :]
        if alive:
            if HAS_INITIAL:
                start = initial + row * initial_row + head * (K * V)
                S = tl.load(start + at, mask=tile_mask, other=0.0).to(tl.float32)
            elif V_FIRST:
                S = tl.zeros((BV, BK), tl.float32)
            else:
                S = tl.zeros((BK, BV), tl.float32)
            a = 1.0
            bias = 0.0
            if HAS_A:
                a = tl.exp(one(A_log + head))
                if DECAY == "channel":
                    a = get_element(a, 0)
            if HAS_BIAS:
                if DECAY == "channel":
                    bias = tl.load(dt_bias + head * K + kk, mask=k_mask, other=0.0).to(tl.float32)
                else:
                    bias = one(dt_bias + head)
            for t in range(length):
                step = tl.cast(t, tl.int64)
                key = tl.load(k_start + step * k_token + kk, mask=k_mask, other=0.0).to(tl.float32)
                query = tl.load(q_start + step * q_token + kk, mask=k_mask, other=0.0).to(tl.float32)
                value = tl.load(v_start + step * v_token + vv, mask=v_mask, other=0.0).to(tl.float32)
                if L2NORM:
                    key = unit(key)
                    query = unit(query)
                query = query * scale

                if DECAY != "none":
                    g_at = g + (bos * g_token if VARLEN else batch * g_batch) + step * g_token
                    if DECAY == "channel":
                        x = tl.load(g_at + head * K + kk, mask=k_mask, other=0.0).to(tl.float32)
                        S = S * along_keys(tl.exp(log_decay(x + bias, a, lower_bound, GATE)), V_FIRST)
                    else:
                        S = S * get_element(tl.exp(log_decay(one(g_at + head) + bias, a, lower_bound, GATE)), 0)
                if HAS_GK:
                    x = tl.load(gk + ((o_token + step) * HV + head) * K + kk, mask=k_mask, other=0.0).to(tl.float32)
                    S = S * along_keys(tl.exp(x), V_FIRST)
                if HAS_GV:
                    x = tl.load(gv + ((o_token + step) * HV + head) * V + vv, mask=v_mask, other=0.0).to(tl.float32)
                    S = S * along_values(tl.exp(x), V_FIRST)

                beta_at = beta_start + step * beta_token
                if BETA_PER_VALUE:
                    x = tl.load(beta_at + head * V + vv, mask=v_mask, other=0.0).to(tl.float32)
                    x = step_size(x, beta_scale, SIGMOID)
                else:
                    x = get_element(step_size(one(beta_at + head), beta_scale, SIGMOID), 0)
                axis: tl.constexpr = 1 if V_FIRST else 0
                key = along_keys(key, V_FIRST)
                u = x * (value - tl.sum(S * key, axis))
                S = S + key * along_values(u, V_FIRST)
                out = tl.sum(S * along_keys(query, V_FIRST), axis)
                o_at = o + ((o_token + step) * HV + head) * V + vv
                tl.store(o_at, out.to(o.dtype.element_ty), mask=v_mask)
                if STORE == "slots":
                    slot = tl.load(indices + n * index_row + t).to(tl.int64)
                    if (slot >= 0) & (slot < slots):
                        to = final + slot * final_row + head * (K * V)
                        tl.store(to + at, S.to(final.dtype.element_ty), mask=tile_mask)
            if STORE == "final":
                to = final + tl.cast(n, tl.int64) * final_row + head * (K * V)
                tl.store(to + at, S.to(final.dtype.element_ty), mask=tile_mask)
        else:
            for t in range(length):
                o_at = o + ((o_token + t) * HV + head) * V + vv
                tl.store(o_at, tl.zeros((BV,), o.dtype.element_ty), mask=v_mask)
            if STORE == "final":
                to = final + tl.cast(n, tl.int64) * final_row + head * (K * V)
                tl.store(to + at, tl.zeros_like(at).to(final.dtype.element_ty), mask=tile_mask)


def value_tile(heads: int, K: int, V: int, cores: int) -> int:
    """Width of the state tiles of `heads` states `K x V` (of all sequences): that which leaves the cores idle least.

    A task costs its columns and, for its loads of single numbers and vectors, about as much as 8 more.
    """
    widest = max(MIN_TILE_VALUES, min(triton.next_power_of_2(V), TILE // triton.next_power_of_2(K)))
    widths = [widest >> i for i in range(widest.bit_length()) if widest >> i >= MIN_TILE_VALUES]

    def rounds(width: int) -> int:
        return -(-heads * -(-V // width) // cores)

    return min(widths, key=lambda width: rounds(width) * (width + 8))


def launch_recurrent(
    tensors: Tensors,
    options: Options,
    cu_seqlens: torch.Tensor | None,
    *,
    inplace: bool = False,
    indices: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cores: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `recurrent_kernel` on checked arguments. Nothing here waits for the device.

    Args:
        tensors, options: the call. With `indices`, `tensors.initial_state` is a pool `[slots, HV, K, V]` (or V-first).
        cu_seqlens: `[N + 1]` on the device, for packed sequences.
        inplace: states go back to where they came from, rounded to the dtype there. Else they go to a new tensor, if
            `options.output_final_state`.
        indices: `[N]` or `[N, S]`, as `ssm_state_indices` of `fused_recurrent_kda_fwd`; sequences whose first slot is
            not in the pool are left alone, their output is 0.
        accepted: `[N]`, its `num_accepted_tokens`.
        out: contiguous, receives o; of v's shape and dtype.
        cores: programs, those of the device by default.

    Returns:
        `(o, states)`: `[B, T, HV, V]` in v's dtype; `initial_state` itself with `inplace`, else `[N, HV, K, V]` (or
        V-first) in float32, or None.
    """
    q, k, v, g, _, A_log, dt_bias, initial, gk, gv = tensors[:10]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    g, beta = None if g is None else _per_head(g), _per_head(tensors.step_size)
    gk, gv = (None if x is None else x.contiguous() for x in (gk, gv))
    o = torch.empty(B, T, HV, V, dtype=v.dtype, device=v.device) if out is None else out
    states = None if initial is None else _whole_rows(initial)
    final, store = None, "none"
    if inplace:
        final, store = states, "final" if indices is None else "slots"
    elif options.output_final_state:
        shape = (N, HV, V, K) if options.state_v_first else (N, HV, K, V)
        final, store = torch.empty(shape, dtype=torch.float32, device=v.device), "final"
    if N > 0:
        columns = 1 if indices is None or indices.ndim == 1 else indices.shape[1]
        programs = cores or vector_core_count(v.device)
        recurrent_kernel[(programs,)](
            q,
            k,
            v,
            g,
            gk,
            gv,
            beta,
            *(None if x is None else x.contiguous() for x in (A_log, dt_bias)),
            states,
            final,
            *(None if x is None else x.contiguous() for x in (indices, accepted, cu_seqlens)),
            o,
            N,
            T,
            0 if states is None else len(states),
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *((0, 0) if g is None else g.stride()[:2]),
            *beta.stride()[:2],
            columns,
            0 if states is None else states.stride(0),
            0 if final is None else final.stride(0),
            options.scale,
            options.lower_bound or 0.0,
            options.beta_scale,
            H=H,
            HV=HV,
            K=K,
            V=V,
            BK=triton.next_power_of_2(K),
            BV=value_tile(N * HV, K, V, programs),
            DECAY="none" if g is None else options.decay,
            GATE=options.gate,
            HAS_GK=gk is not None,
            HAS_GV=gv is not None,
            HAS_A=A_log is not None and options.gate != "none",
            HAS_BIAS=dt_bias is not None and options.gate != "none",
            L2NORM=options.qk_l2norm,
            SIGMOID=options.beta_sigmoid,
            BETA_PER_VALUE=beta.ndim == 4,
            HAS_INITIAL=states is not None,
            V_FIRST=options.state_v_first,
            STORE=store,
            POOLED=indices is not None,
            VARLEN=cu_seqlens is not None,
            **launch_options(**OPTIONS),
        )
    if inplace and initial is not None:
        if final is not initial and final is not None:
            initial.copy_(final)
        return o, initial
    return o, final


def _per_head(x: torch.Tensor) -> torch.Tensor:
    """x `[B, T, HV, ...]` with all behind T contiguous."""
    return x if x.stride(-1) == 1 and x.stride(2) == x.shape[3:].numel() else x.contiguous()


def _whole_rows(states: torch.Tensor) -> torch.Tensor:
    """States with all but their first axis contiguous: rows may have gaps, as in a pool that shares its memory."""
    return states if states[:1].is_contiguous() else states.contiguous()


def builds() -> list[KernelBuild]:
    """What the compile test covers."""
    found = []
    Flags = dict[str, bool | str]
    cases: list[tuple[str, str, int, int, int, int, Flags]] = [
        ("gdn", "bf16", 16, 32, 128, 128, {"DECAY": "scalar", "GATE": "softplus", "V_FIRST": True, "POOLED": True}),
        ("gdn", "fp16", 16, 16, 128, 128, {"DECAY": "scalar", "GATE": "none", "VARLEN": True}),
        ("gdn", "bf16", 4, 8, 256, 256, {"DECAY": "scalar", "GATE": "softplus"}),
        ("gdn", "fp32", 4, 4, 100, 60, {"DECAY": "scalar", "GATE": "none", "HAS_GK": True, "HAS_GV": True}),
        ("kda", "bf16", 32, 32, 128, 128, {"DECAY": "channel", "GATE": "bounded", "V_FIRST": True, "POOLED": True}),
        ("kda", "bf16", 32, 32, 128, 128, {"DECAY": "channel", "GATE": "softplus", "VARLEN": True}),
        ("kda", "fp32", 4, 4, 64, 64, {"DECAY": "channel", "GATE": "none", "BETA_PER_VALUE": True}),
        ("delta", "bf16", 8, 8, 128, 128, {"DECAY": "none", "GATE": "none"}),
    ]
    for name, dtype, H, HV, K, V, flags in cases:
        raw = flags["GATE"] != "none"
        pooled, packed = bool(flags.get("POOLED")), bool(flags.get("VARLEN"))
        BV = value_tile(1024, K, V, 40)
        fixed: dict[str, int | float | bool | str | None] = {
            "H": H,
            "HV": HV,
            "K": K,
            "V": V,
            "BK": triton.next_power_of_2(K),
            "BV": BV,
            "HAS_A": raw,
            "HAS_BIAS": raw,
            "L2NORM": True,
            "SIGMOID": raw,
            "HAS_INITIAL": True,
            "STORE": "slots" if pooled else "final",
            **dict.fromkeys(("HAS_GK", "HAS_GV", "BETA_PER_VALUE", "V_FIRST", "POOLED", "VARLEN"), False),
            **flags,
        }
        signature = {
            **dict.fromkeys(("q", "k", "v", "g", "gk", "gv", "beta", "o"), f"*{dtype}"),
            **dict.fromkeys(("A_log", "dt_bias", "initial", "final"), "*fp32"),
            **dict.fromkeys(("indices", "accepted", "cu_seqlens"), "*i32"),
            **dict.fromkeys(_NUMBERS, "i32"),
            **dict.fromkeys(("scale", "lower_bound", "beta_scale"), "fp32"),
        }
        absent = {"g"} if flags["DECAY"] == "none" else set()
        absent |= set() if fixed["HAS_GK"] else {"gk", "gv"}
        absent |= set() if raw else {"A_log", "dt_bias"}
        absent |= set() if pooled else {"indices", "accepted"}
        absent |= set() if packed else {"cu_seqlens"}
        layout = "VK" if fixed["V_FIRST"] else "KV"
        extra = "".join(f"-{word}" for word, used in (("pool", pooled), ("packed", packed)) if used)
        found.append(
            KernelBuild(
                name=f"recurrent-{name}-{flags['GATE']}-{dtype}-K{K}-V{V}-{layout}{extra}",
                kernel=f"{__name__}:recurrent_kernel",
                signature={argument: kind for argument, kind in signature.items() if argument not in absent},
                constants=fixed | dict.fromkeys(absent),
                options=OPTIONS,
            )
        )
    return found
