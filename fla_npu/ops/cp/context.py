"""FLA's description of sequences that are split over processes."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fla_npu.ops.checks import sequence_bounds

LAYOUTS = ("contiguous", "zigzag")


@dataclass(eq=False)
class FLACPContext:
    """How this process's tokens continue in the others; the attributes are FLA's.

    No op here takes one, so nothing but `num_seqs`, `is_cp_enabled` and `copy_for_backward` gives them a meaning.
    """

    group: dist.ProcessGroup | None = None
    """None without context parallelism."""
    cu_seqlens: torch.Tensor | None = None
    """`[N + 1]`, bounds of what this process has of the sequences."""
    cu_seqlens_cpu: torch.Tensor | None = None
    is_last_rank: bool | None = None
    """Whether its last sequence ends here."""
    pre_num_ranks: int | None = None
    """How many processes before this one share its first sequence."""
    is_first_rank: bool | None = None
    """Whether its first sequence starts here."""
    post_num_ranks: int | None = None
    """How many processes after this one share its last sequence."""
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: int | None = None
    """Tokens of its first sequence in the processes before."""
    pre_num_ranks_dev: torch.Tensor | None = None
    post_num_ranks_dev: torch.Tensor | None = None
    layout: str = "contiguous"
    part_len: int | None = None
    front_num_seqs: int | None = None
    pre_num_ranks_by_part: tuple[int, int] | None = None
    post_num_ranks_by_part: tuple[int, int] | None = None
    is_first_by_part: tuple[bool, bool] | None = None
    is_last_by_part: tuple[bool, bool] | None = None
    pre_num_conv_tokens_by_part: tuple[int, int] | None = None

    def copy_for_backward(self) -> "FLACPContext":
        """A copy whose bounds may be written to."""
        device, host = (None if x is None else x.clone() for x in (self.cu_seqlens, self.cu_seqlens_cpu))
        return replace(self, cu_seqlens=device, cu_seqlens_cpu=host)

    @property
    def num_seqs(self) -> int:
        """Sequences of which this process has tokens."""
        return 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def is_cp_enabled(self) -> bool:
        return self.group is not None


def build_cp_context(
    cu_seqlens: torch.Tensor,
    group: dist.ProcessGroup | None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    **kwargs: Any,
) -> FLACPContext:
    """The context of a group of one process, which has all sequences to itself.

    Args:
        cu_seqlens: `[N + 1]`, bounds of the sequences. Those without tokens are left out of the context, as in FLA.
        group: of one process, or None.
        conv1d_kernel_size: kept in the context.
        cu_seqlens_cpu: the same bounds on the host, which saves a device synchronisation.
        use_tf32x3_affine_chain: must be True, as in FLA.
        layout: `"contiguous"` or `"zigzag"`, between which one process makes no difference.

    Returns:
        A context with int32 bounds.

    Raises:
        ValueError: bounds that are none, or of no tokens; an unknown layout; `use_tf32x3_affine_chain=False`.
        TypeError: other keyword arguments.
        NotImplementedError: `group` has several processes.
    """
    if kwargs:
        raise TypeError(f"build_cp_context has no arguments {sorted(kwargs)}")
    if not use_tf32x3_affine_chain:
        raise ValueError("use_tf32x3_affine_chain must be True")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    processes = 1 if group is None else dist.get_world_size(group)
    if processes > 1:
        raise NotImplementedError(f"context parallelism is not supported, and group has {processes} processes")
    bounds = sequence_bounds(cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    if bounds[-1] == 0:
        raise ValueError("cu_seqlens must hold at least one token, got none")
    local = torch.tensor(sorted(set(bounds)), dtype=torch.int32)
    return FLACPContext(
        group=group,
        cu_seqlens=local.to(cu_seqlens.device),
        cu_seqlens_cpu=local,
        is_first_rank=True,
        is_last_rank=True,
        pre_num_ranks=0,
        post_num_ranks=0,
        conv1d_kernel_size=conv1d_kernel_size,
        pre_num_conv_tokens=0,
    )
