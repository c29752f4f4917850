"""The third tier of the schedule: few heads of long sequences, cut into segments that run side by side.

The state after a segment is linear in the state before it, `S_out = M S_in + C`, column by column. With a segment
taken for a sequence of its own the kernel itself computes all that is needed, in three launches over all segments:

1. C, the final states from no state;
2. M, the final states from the identity with v = 0; then `S_in` of every segment, one small product after another;
3. the call, with each segment's `S_in`. Its results are those of one launch up to the rounding of the states at the
   borders.

That is three times the work, and worth it where one launch would leave most cores without work; `planner.kernels`
decides.
"""

from dataclasses import replace
from itertools import accumulate

import torch

from fla_npu.ops.common.ascend import core_count
from fla_npu.ops.common.configs import Config
from fla_npu.ops.common.launch import dealt, launch_chunks
from fla_npu.ops.problem import Options, Tensors


def launch_balanced(
    tensors: Tensors,
    options: Options,
    config: Config,
    *,
    cu_seqlens: torch.Tensor | None = None,
    lengths: list[int] | None = None,
    fast: bool = False,
    cores: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`launch_chunks`, in segments where the planner says that they end earlier. Arguments and results as there."""
    cores = core_count(tensors.v.device) if cores is None else cores
    segments = dealt(tensors, options, config, cu_seqlens=cu_seqlens, lengths=lengths, cores=cores).segments
    if segments is None:
        return launch_chunks(
            tensors, options, config, cu_seqlens=cu_seqlens, lengths=lengths, fast=fast, cores=cores
        )  # fmt: skip
    return launch_segments(tensors, options, config, segments, fast=fast, cores=cores)


def launch_segments(
    tensors: Tensors,
    options: Options,
    config: Config,
    segments: tuple[tuple[int, ...], ...],
    *,
    fast: bool = False,
    cores: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a call in segments.

    Args:
        segments: their lengths, per sequence; multiples of the chunk but for the last of a sequence.

    Returns:
        o `[B, T, HV, V]` and the final state or None.
    """
    B, T, HV, V = tensors.v.shape
    K = tensors.k.shape[3]
    device = tensors.v.device
    packed = tensors.map_tokens(lambda x: x.reshape(1, B * T, *x.shape[2:]))
    lengths = [length for sequence in segments for length in sequence]
    if sum(lengths) != B * T:
        raise ValueError(f"segments must have {B * T} tokens together, got {sum(lengths)}")
    bounds = torch.tensor([0, *accumulate(lengths)], device=device)

    inner = replace(options, output_final_state=True, state_v_first=False)

    def launch(call: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        o, final = launch_chunks(call, inner, config, cu_seqlens=bounds, lengths=lengths, fast=fast, cores=cores)
        assert final is not None
        return o, final

    _, C = launch(packed._replace(initial_state=None))
    # One row of zeros stands for the values of all tokens.
    nothing = torch.zeros(1, 1, 1, K, dtype=tensors.v.dtype, device=device).expand(1, B * T, HV, K)
    eye = torch.eye(K, dtype=torch.float32, device=device).expand(len(lengths), HV, K, K)
    _, M = launch(packed._replace(v=nothing, initial_state=eye))

    S = tensors.initial_state
    if S is None:
        S = torch.zeros(len(segments), HV, K, V, dtype=torch.float32, device=device)
    elif options.state_v_first:
        S = S.transpose(2, 3)
    states = list(S.float())
    starts = torch.empty(len(lengths), HV, K, V, dtype=torch.float32, device=device)
    segment = 0
    for n, sequence in enumerate(segments):
        for _ in sequence:
            starts[segment] = states[n]
            states[n] = torch.baddbmm(C[segment], M[segment], states[n])
            segment += 1
    o, final = launch(packed._replace(initial_state=starts))
    o = o.view(B, T, HV, V)
    if not options.output_final_state:
        return o, None
    for n, end in enumerate(accumulate(len(sequence) for sequence in segments)):
        if segments[n]:
            states[n] = final[end - 1]
    S = torch.stack(states)
    return o, S.transpose(2, 3).contiguous() if options.state_v_first else S
