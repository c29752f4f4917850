"""One token: the recurrence itself, without the machinery of chunks. Decoding calls this per layer and token."""

import torch

from fla_npu.ops.common.prepare import Loader, Run
from fla_npu.ops.problem import Options, Tensors

_TOKEN = slice(0, 1)


def decode_step(
    tensors: Tensors, options: Options, run: Run, S: torch.Tensor, o: torch.Tensor, final: torch.Tensor | None
) -> None:
    """Advance every sequence of a run by its only token.

    Both reads of the state, for k and for q, are one product with the old state; the read of q after the update is
    `decay S^T q + (q . k) u`.

    Args:
        tensors, options, run: the call and its sequences of one token.
        S: their states `[n,HV,K,V]`, any strides; not written to.
        o: receives the output, `[n,1,HV,V]`.
        final: receives the new states, `[n,HV,K,V]`, any strides; may be S itself. None if nobody wants them.
    """
    chunk = Loader(tensors, options, run).load(_TOKEN)
    n, HV, K, V = S.shape
    decay = chunk.g.exp2()
    kq = chunk.kq.view(n, -1, 1, 2, K)
    R = HV // kq.shape[1]
    if R > 1:
        kq = kq.expand(n, -1, R, 2, K)
    kq = kq.reshape(n, HV, 2, K)
    k, q = kq[:, :, 0], kq[:, :, 1]
    if options.decay == "channel":
        decay = decay.view(n, HV, K, 1)
        X = (kq * decay.mT) @ S
    else:
        decay = decay.view(n, HV, 1, 1)
        X = (kq @ S).mul_(decay)
    u = (chunk.v.view(n, HV, V) - X[:, :, 0]).mul_(chunk.beta.view(n, HV, -1))
    o.copy_(torch.addcmul(X[:, :, 1], u, (q * k).sum(-1, keepdim=True)).view(n, 1, HV, V))
    if final is not None:
        torch.mul(S, decay, out=final).addcmul_(k[..., None], u[:, :, None])
