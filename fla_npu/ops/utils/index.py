"""Index tensors of packed sequences, under FLA's names.

`cu_seqlens` is an integer tensor `[N+1]`, `0, ..., T`. Where a function takes `cu_seqlens_cpu`, a host copy of it,
sizes are read from that and a device need not be waited for. Results have the dtype and device of `cu_seqlens`.
Unlike FLA's, sequence ids count empty sequences: they always index `cu_seqlens`.
"""

import torch
import torch.nn.functional as F

from fla_npu.utils import tensor_cache


def prepare_lens(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Sequence lengths `[N]`."""
    return torch.diff(cu_seqlens)


def prepare_lens_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """Number of true entries per row of a `[N,T]` mask, int32 `[N]`."""
    return mask.sum(dim=-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: torch.Tensor, dtype: torch.dtype | None = torch.int32) -> torch.Tensor:
    """Bounds `[N+1]` of sequences of the lengths `[N]`, packed in order."""
    return F.pad(lens.cumsum(dim=0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: torch.Tensor, dtype: torch.dtype | None = torch.int32) -> torch.Tensor:
    """Bounds `[N+1]` of the sequences that the rows of a `[N,T]` mask hold, packed in order."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def _segments(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For `counts[n]` items of each segment n, in order: the segment of every item, and its place there."""
    segment = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    first = counts.cumsum(0) - counts
    return segment, torch.arange(segment.numel(), device=counts.device) - first[segment]


@tensor_cache
def prepare_position_ids(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None = None) -> torch.Tensor:
    """Place of every token in its sequence, `[T]`."""
    return prepare_token_indices(cu_seqlens, cu_seqlens_cpu)[:, 1]


@tensor_cache
def prepare_sequence_ids(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None = None) -> torch.Tensor:
    """Sequence of every token, int64 `[T]`."""
    return prepare_token_indices(cu_seqlens, cu_seqlens_cpu)[:, 0].long()


@tensor_cache
def prepare_token_indices(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None = None) -> torch.Tensor:
    """Rows (sequence, place in it) of every token, `[T,2]`."""
    lens = prepare_lens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    return torch.stack(_segments(lens), 1).to(cu_seqlens)


@tensor_cache
def prepare_chunk_indices(
    cu_seqlens: torch.Tensor, chunk_size: int, cu_seqlens_cpu: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows (sequence, chunk in it) of every chunk, `[NT,2]`; the last chunk of a sequence may be short."""
    lens = prepare_lens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    return torch.stack(_segments(_chunk_counts(lens, chunk_size)), 1).to(cu_seqlens)


def prepare_chunk_offsets(cu_seqlens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Number of chunks before every sequence, and in all, int64 `[N+1]`."""
    counts = _chunk_counts(prepare_lens(cu_seqlens), chunk_size)
    return F.pad(counts.cumsum(0), (1, 0))


def prepare_chunk_indices_static(
    cu_seqlens: torch.Tensor, chunk_size: int, nt_max: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(chunk_indices [nt_max,2], chunk_offsets [N+1])` with shapes that do not depend on values: nothing is read back.

    Rows past the last chunk are (-1, 0).
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    slots = torch.arange(nt_max, device=cu_seqlens.device, dtype=offsets.dtype)
    # The last sequence that starts at or before a slot: of several with the same offset, those before it are empty.
    sequence = (torch.searchsorted(offsets, slots, right=True) - 1).clamp(max=offsets.numel() - 2)
    rows = torch.stack([sequence, slots - offsets[sequence]], 1)
    rows = torch.where((slots < offsets[-1])[:, None], rows, torch.tensor([-1, 0], device=rows.device))
    return rows.to(cu_seqlens), offsets.to(cu_seqlens)


def get_max_num_splits(cu_seqlens: torch.Tensor, chunk_size: int, cu_seqlens_cpu: torch.Tensor | None = None) -> int:
    """Largest number of chunks of a sequence."""
    lens = prepare_lens(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    return int(_chunk_counts(lens, chunk_size).max())


def _chunk_counts(lens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    return (lens + (chunk_size - 1)).div(chunk_size, rounding_mode="floor")
