"""Where the time of a forward pass goes: PyTorch's own profile of one call, per chunk of 64 tokens.

    python -m benchmarks.profile --op gdn --threads 2

The shape is that of the target case, B = 1, 16 heads of 128, float32. What the operators do not account for
is Python between them.
"""

import statistics
import time
from collections import defaultdict

import click
import torch

from benchmarks.registry import CHUNK
from fla_npu.ops import chunk_gated_delta_rule, chunk_kda
from fla_npu.testing import make_inputs

HEADS, DIM = 16, 128
CALLS = 5


@click.command()
@click.option("--op", type=click.Choice(["gdn", "kda"]), default="gdn", show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--tokens", type=click.IntRange(CHUNK), default=4096, show_default=True)
@click.option("--rows", type=click.IntRange(1), default=16, show_default=True, help="Operators to list.")
def main(op: str, threads: int, tokens: int, rows: int) -> None:
    """Print microseconds per chunk, operator by operator."""
    torch.set_num_threads(threads)
    shape = {"T": tokens, "H": HEADS, "HV": HEADS, "K": DIM, "V": DIM}
    q, k, v, g, beta, state = make_inputs(channel=op == "kda", **shape)
    function = chunk_kda if op == "kda" else chunk_gated_delta_rule
    chunks = tokens / CHUNK

    def call() -> None:
        function(q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    with torch.inference_mode():
        call()
        walls = []
        for _ in range(CALLS):
            start = time.perf_counter()
            call()
            walls.append(time.perf_counter() - start)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            call()
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in profile.events():
        spent[event.name, str(event.input_shapes)].append(event.self_cpu_time_total)
    wall = statistics.median(walls) * 1e6 / chunks
    total = sum(map(sum, spent.values())) / chunks
    print(f"{op}, {threads} threads: {wall:.0f} us per chunk, {total:.0f} of them in operators while profiled")
    for (name, shapes), times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:rows]:
        print(f"{sum(times) / chunks:8.0f} us in {len(times) / chunks:5.2f} calls of {name:34} {shapes[:90]}")


if __name__ == "__main__":
    main()
