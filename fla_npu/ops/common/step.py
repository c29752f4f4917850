"""One token: the recurrence itself, without the machinery of chunks. Decoding calls this per layer and token, so the
number of PyTorch calls is what counts."""

import torch

from fla_npu.dtypes import compute_dtype
from fla_npu.ops.common.gate import gate_forward
from fla_npu.ops.common.prepare import L2NORM_EPS, gate_parameters
from fla_npu.ops.common.solve import solve_unit_lower
from fla_npu.ops.problem import Options, Problem, Tensors
from fla_npu.ops.utils.constant import RCP_LN2


def decode(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """Run a call of one token for every sequence of the batch; results as those of `chunked_forward`."""
    tensors, options, _ = problem
    B, K = tensors.q.shape[0], tensors.q.shape[3]
    HV, V = tensors.v.shape[2:]
    S = tensors.initial_state
    if S is None:
        S = torch.zeros(B, HV, K, V, dtype=compute_dtype(tensors.q), device=tensors.v.device)
    elif options.state_v_first:
        S = S.transpose(-1, -2)
    final = k_first = None
    if options.output_final_state:
        shape = (B, HV, V, K) if options.state_v_first else (B, HV, K, V)
        final = torch.empty(shape, dtype=compute_dtype(tensors.q), device=tensors.v.device)
        k_first = final.transpose(-1, -2) if options.state_v_first else final
    return one_token(tensors, options, S, k_first).to(tensors.v.dtype), final, None


def one_token(tensors: Tensors, options: Options, S: torch.Tensor, final: torch.Tensor | None) -> torch.Tensor:
    """Advance n sequences by one token each.

    Both reads of the state, for k and for q, are one product with the old state; the read of q after the update is
    `decay S^T q + (q . k) u`. Without the delta rule only q reads.

    Args:
        tensors: the arguments, `[n, 1, ...]` (or `[n, updates, ...]`); beta may also be one per value channel.
        options: those of the call.
        S: the states `[n,HV,K,V]`, any strides and floating dtype; not written to.
        final: receives the new states, `[n,HV,K,V]`, any strides; may be S itself. None if nobody wants them.

    Returns:
        The output `[n,1,HV,V]` in working precision.
    """
    if options.updates > 1:
        return _several_updates(tensors, options, S, final)
    dtype = compute_dtype(tensors.q)
    v = tensors.v[:, 0]
    kq = _keys_and_query(tensors, options)  # [n, HV, 2, K]
    k, q = kq.unbind(2)
    if tensors.b is not None:
        kq = torch.stack((k * tensors.b[:, 0], q), dim=2)
    if tensors.beta is None:
        kq = q[:, :, None]
    if tensors.w is not None:
        v = v.to(dtype) * tensors.w[:, 0]

    S = S.to(dtype)
    if tensors.g is None:
        decay = None
        X = torch.matmul(kq, S)
    else:
        g = tensors.g[:, 0].to(dtype)
        if options.gate != "none":
            g = gate_forward(g, *gate_parameters(tensors, options), options.gate, options.lower_bound)
        decay = torch.exp2(g * RCP_LN2)
        if options.decay == "channel":
            X = torch.matmul(kq * decay[:, :, None], S)
            decay = decay[..., None]
        else:
            decay = decay[..., None, None]
            X = torch.matmul(kq, S).mul_(decay)
    if tensors.beta is None:
        u = v.to(dtype)
    else:
        beta = tensors.beta[:, 0].to(dtype)
        if options.beta_sigmoid:
            beta = torch.sigmoid(beta).mul_(options.beta_scale)
        u = torch.sub(v, X[:, :, 0]).mul_(beta if beta.ndim == 3 else beta[..., None])
    if final is not None:
        final = final.copy_(S) if decay is None else torch.mul(S, decay, out=final)
        final.addcmul_(k[..., None], u[:, :, None])
    o = torch.addcmul(X[:, :, -1], u, torch.linalg.vecdot(q, k)[..., None])
    return o.mul_(options.scale)[:, None]


def _several_updates(tensors: Tensors, options: Options, S: torch.Tensor, final: torch.Tensor | None) -> torch.Tensor:
    """`one_token` with several updates (and a decay per head or none): the stages of a chunk, which reads and writes
    the state once, where one update after the other would do so once each."""
    dtype = compute_dtype(tensors.q)
    kq = _keys_and_query(tensors, options)
    k, q = kq[:, :, :-1], kq[:, :, -1:]
    beta = tensors.step_size.to(dtype).transpose(1, 2)[..., None]

    S = S.to(dtype)
    X = torch.matmul(kq, S)
    if tensors.g is None:
        decayed = S
    else:
        decay = torch.exp2(tensors.g[:, 0].to(dtype) * RCP_LN2)[..., None, None]
        X.mul_(decay)
        decayed = S if final is None else torch.mul(S, decay, out=final)
    A = torch.matmul(k, k.mT).mul_(beta).flatten(0, 1)
    b = torch.sub(tensors.v.transpose(1, 2), X[:, :, :-1]).mul_(beta).flatten(0, 1)
    u = solve_unit_lower(A, b).unflatten(0, kq.shape[:2])
    if final is not None:
        torch.add(decayed, torch.matmul(k.mT, u), out=final)
    o = torch.matmul(torch.matmul(q, k.mT), u).add_(X[:, :, -1:])
    return o.mul_(options.scale).transpose(1, 2)


def _keys_and_query(tensors: Tensors, options: Options) -> torch.Tensor:
    """The keys of one token and, last, its query, normalised if asked for: `[n, HV, updates + 1, K]`."""
    kq = torch.cat((tensors.k, tensors.q), dim=1).transpose(1, 2).to(compute_dtype(tensors.q))
    if options.qk_l2norm:
        kq = kq * torch.linalg.vecdot(kq, kq).add_(L2NORM_EPS).rsqrt_()[..., None]
    H, HV = kq.shape[1], tensors.v.shape[2]
    return kq.repeat_interleave(HV // H, dim=1) if H < HV else kq
