"""Exchange of tensors between the processes of a group, under FLA's names. Tensors have one shape in all of them."""

import torch
import torch.distributed as dist


def all_gather_into_tensor(
    inp: torch.Tensor,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> tuple[torch.Tensor, dist.Work | None]:
    """The tensors of all processes.

    Args:
        inp: `[...]`, of this process.
        out: `[processes, ...]`, receives the result; a new tensor when None.
        group: the default group when None.
        async_op: return before it is done.

    Returns:
        The result and, with `async_op`, what to wait for.
    """
    if out is None:
        out = inp.new_empty(dist.get_world_size(group), *inp.shape)
    return out, dist.all_gather(list(out), inp.contiguous(), group=group, async_op=async_op)


def all_reduce_sum(
    inp: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> tuple[torch.Tensor, dist.Work | None]:
    """The sum over all processes, **written to** `inp`, and what to wait for with `async_op`."""
    return inp, dist.all_reduce(inp, op=dist.ReduceOp.SUM, group=group, async_op=async_op)


def send_recv_fwd(
    send_tensor: torch.Tensor, group: dist.ProcessGroup | None, recv_from_prev: bool = True
) -> torch.Tensor:
    """What the process before this one (or after it) sends; zeros if there is none. All of the group must call it."""
    return _of_neighbour(send_tensor, group, -1 if recv_from_prev else 1)


def send_recv_bwd(
    send_tensor: torch.Tensor, group: dist.ProcessGroup | None, recv_from_next: bool = True
) -> torch.Tensor:
    """What the process after this one (or before it) sends; zeros if there is none. All of the group must call it."""
    return _of_neighbour(send_tensor, group, 1 if recv_from_next else -1)


def conv_cp_send_recv_fwd(tails: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The last tokens of the process before this one, which a convolution needs before its first."""
    return send_recv_fwd(tails, group)


def conv_cp_send_recv_bwd(d_initial_state: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The gradient that the process after this one has for the last tokens of this one."""
    return send_recv_bwd(d_initial_state, group)


def _of_neighbour(tensor: torch.Tensor, group: dist.ProcessGroup | None, offset: int) -> torch.Tensor:
    # A gather, so that every process takes part in the same collective, the first and the last too.
    gathered, _ = all_gather_into_tensor(tensor, group=group)
    source = dist.get_rank(group) + offset
    return gathered[source].clone() if 0 <= source < len(gathered) else torch.zeros_like(tensor)
