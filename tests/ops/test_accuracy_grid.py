"""The accuracy that the HA-NPU paper reports, on as many instances: float16 q, k, v, float32 gates and states.

Over 360 instances of GDN, against float64: NMSE of the outputs, stored as float16, at most 5.23e-8 and of the final
states at most 9.38e-12. Storing a number as float16 alone costs 4.35e-8 (mean over mantissas of (ulp / x)^2 / 12), so
that no more than a fifth is left for everything else; the state allows for no 16-bit intermediate at all.
"""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from fla_npu.ops.common.chunk_form import delta_chunk_form
from fla_npu.testing import Inputs, make_inputs, nmse, reference
from tests.ops.calls import OPS

OUTPUT_BOUND, STATE_BOUND = 5.23e-8, 9.38e-12


def forgetful(made: Inputs, factor: float, seed: int) -> Inputs:
    """Gates `logsigmoid(u) * factor`, the `gate_logit_normalizer` of FLA's tests: from hardly any decay to strong."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(made.g.shape, generator=generator)
    return made._replace(g=torch.nn.functional.logsigmoid(u) * factor)


def instances(
    op: str, lengths: tuple[int, ...], heads: tuple[int, ...], sides: tuple[int, ...], batch: int
) -> Iterator[Inputs]:
    """Batches whose rows are independent instances."""
    grid = product(lengths, heads, sides, (0.01, 0.1, 1.0, 4.0))
    for seed, (T, H, D, strength) in enumerate(grid):
        made = make_inputs(
            B=batch, T=T, H=H, HV=2 * H, K=D, V=D, channel=op == "chunk_kda", dtype=torch.float16, seed=seed
        )
        yield forgetful(made._replace(beta=made.beta.float()), strength, seed)


def worst(op: str, batches: Iterator[Inputs]) -> tuple[int, float, float]:
    """Number of instances, and the largest NMSE of an output and of a final state among them."""
    count, output, state = 0, 0.0, 0.0
    for made in batches:
        o, last = OPS[op](**made._asdict(), output_final_state=True)
        want_o, want_last = float64(made)
        assert o.dtype == torch.float16 and last.dtype == torch.float32
        for row in range(len(o)):
            count += 1
            output = max(output, nmse(o[row], want_o[row]))
            state = max(state, nmse(last[row], want_last[row]))
    return count, output, state


def float64(made: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return delta_chunk_form(
        made.q,
        made.k,
        made.v,
        beta=made.beta,
        g=made.g,
        initial_state=made.initial_state,
        chunk_size=32,
        dtype=torch.float64,
    )


@pytest.mark.parametrize("op", ["chunk_gdn", "chunk_kda"])
def test_the_fast_reference_is_the_recurrence(op: str):
    for made in instances(op, (200,), (1,), (64,), 2):
        assert all(nmse(x, y) < 1e-24 for x, y in zip(float64(made), reference(made), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "lengths", "heads", "sides", "batch", "total"),
    [
        ("chunk_gdn", (512, 1024, 2048), (1, 2), (64, 128), 7, 336),
        ("chunk_gdn", (4096,), (1,), (64, 128), 3, 24),
        ("chunk_kda", (512, 1024), (1,), (64, 128), 2, 32),
    ],
    ids=["gdn", "gdn-long", "kda"],
)
def test_grid(
    op: str,
    lengths: tuple[int, ...],
    heads: tuple[int, ...],
    sides: tuple[int, ...],
    batch: int,
    total: int,
    record_property: Callable[[str, object], None],
):
    count, output, state = worst(op, instances(op, lengths, heads, sides, batch))
    record_property("instances", count)
    record_property("largest NMSE of o", output)
    record_property("largest NMSE of the final state", state)
    print(f"{op}: {count} instances, NMSE of o at most {output:.3g}, of the final state at most {state:.3g}")
    assert count == total
    assert output <= OUTPUT_BOUND and state <= STATE_BOUND
