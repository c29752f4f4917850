"""What the launchers ask: configurations, schedules and segments, for lengths that are known and for others."""

import pytest

from fla_npu.ops.common.configs import Config
from fla_npu.ops.common.tune import config_for
from fla_npu.planner.chips import CHIPS, chip
from fla_npu.planner.cost import schedule_cost
from fla_npu.planner.dataflow import RECURRENCES
from fla_npu.planner.kernels import KERNELS, PASSES, SHORTEST, WORTH, configuration, deal, refusal
from fla_npu.planner.schedule import equal_schedule, schedule
from tests.work import calls

CALL = {"V": 128, "heads": 4, "cores": 20, "sequences": 3, "tokens": 9000}


def test_configuration_is_that_of_the_call_with_rows_padded():
    sizes = {"dtype": "bf16", "fast": False, "heads": 6, "sequences": 4}
    for op in KERNELS:
        wanted = config_for(
            op, "910B3", 64, 112, "bf16", False, heads=6, sequences=4, length=100, cores=20, bounded=True
        )  # fmt: skip
        assert configuration(op, "910B3", K=60, V=100, tokens=400, **sizes) == wanted.fit(112)


def test_short_sequences_of_a_batch_are_short_and_long_ones_long():
    """`tokens` are those of all sequences: many long ones must not pass for short ones."""
    one = {"K": 128, "V": 128, "dtype": "bf16", "fast": False, "heads": 2}
    short = configuration("chunk_gdn", "910B3", sequences=64, tokens=64 * 16, **one)
    long = configuration("chunk_gdn", "910B3", sequences=64, tokens=64 * 1024, **one)
    assert short.chunk == 16 and long.chunk == 64


@pytest.mark.parametrize("op", RECURRENCES)
def test_lengths_decide_the_schedule_where_they_are_known(op):
    config, cost = Config(chunk=32, width=64, tile=32), schedule_cost(op)
    sizes = {"value_dim": 128, "tiles": (32, 64), "chunk": 32, "cost": cost}
    known = deal(op, config, lengths=(100, 8000, 900), **CALL).schedule
    assert known == schedule([100, 8000, 900], 4, 20, **sizes) and known.order is not None
    unknown = deal(op, config, **CALL)
    assert unknown.schedule == equal_schedule(3, 4, 20, length=3000, **sizes)
    assert unknown.schedule.order is None and unknown.segments is None


def test_equal_lengths_need_no_table():
    made = deal("gdn", Config(), lengths=(3000,) * 3, **CALL)
    assert made.schedule.order is None


def test_few_heads_of_long_sequences_are_cut():
    config = Config(chunk=16, width=32)
    cut = deal("gdn", config, V=16, heads=1, cores=20, sequences=1, tokens=4096, lengths=(4096,)).segments
    assert cut is not None and sum(cut[0]) == 4096 and len(cut[0]) == 4096 // 16 // SHORTEST
    assert all(length % 16 == 0 for length in cut[0])
    sizes = {"value_dim": 16, "tiles": (16,), "chunk": 16, "cost": schedule_cost("gdn")}
    one, three = (schedule(lengths, 1, 20, **sizes).makespan for lengths in ((4096,), cut[0]))
    assert PASSES * three < WORTH * one
    for tokens, heads, cores in ((4096, 16, 20), (512, 1, 20), (4096, 1, 2)):
        call = {"V": 16, "heads": heads, "cores": cores, "sequences": 1, "tokens": tokens, "lengths": (tokens,)}
        assert deal("gdn", config, **call).segments is None


def test_asking_again_needs_no_work():
    lengths = tuple(100 + n for n in range(1000))
    call = {"V": 128, "heads": 64, "cores": 24, "sequences": 1000, "tokens": sum(lengths), "lengths": lengths}
    first = deal("kda", Config(), **call)
    assert deal("kda", Config(), **call) is first
    assert calls(deal, "kda", Config(), **call) < 100


def test_chips_without_a_kernel_say_why():
    for one in CHIPS.values():
        assert refusal("gla", one) == "there is no kernel for gla"
        if one.no_triton_reason:
            assert refusal("gdn", one) == one.no_triton_reason
    assert refusal("kda", chip("910B3")) is None
    assert "do not fit on A5" in str(refusal("gdn", chip("950")))
