"""The head schedule: every column of every head exactly once, on a core, by the ids that a kernel walks; balance."""

from array import array
from collections import Counter
from functools import partial
from heapq import heapify, heapreplace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fla_npu.planner import schedule as planner
from fla_npu.planner.schedule import TAIL_FACTOR, TILES, Cost, Item, Schedule
from tests.work import calls

COST = Cost(fixed=112)
schedule = partial(planner.schedule, cost=COST)
equal_schedule = partial(planner.equal_schedule, cost=COST)
COSTS = st.sampled_from([COST, Cost(fixed=0), Cost(fixed=36), Cost(fixed=1000, start=3)])
CORES = st.integers(1, 24)
HEADS = st.integers(1, 20)
VALUE_DIMS = st.sampled_from([1, 60, 64, 96, 128, 192, 256, 320])
LENGTHS = st.lists(
    st.one_of(st.just(0), st.integers(1, 500), st.integers(1, 2**20), st.sampled_from([64, 4096])), max_size=12
)


def walk(plan: Schedule, pid: int) -> list[Item]:
    """What a kernel computes from its program id: the text of the module's docstring."""
    split, items = plan.split, []
    if plan.order is None:
        units = list(range(pid, split.whole, plan.cores))
        tiles = list(range(split.whole * split.parts + pid, split.units * split.parts, plan.cores))
    else:
        bounds, ids = plan.order.bounds, plan.order.ids
        units = list(ids[bounds[2 * pid] : bounds[2 * pid + 1]])
        tiles = list(ids[bounds[2 * pid + 1] : bounds[2 * pid + 2]])
    for unit, part, columns in [(u, 0, split.width) for u in units] + [
        (t // split.parts, t % split.parts, split.tile) for t in tiles
    ]:
        block, head = unit % split.blocks, unit // split.blocks % plan.heads
        column = block * split.width + part * split.tile
        items.append(Item(unit // (split.blocks * plan.heads), head, column, min(columns, plan.value_dim - column)))
    return items


def check_coverage(plan: Schedule, n_sequences: int, items: list[Item]) -> None:
    assert all(item.columns > 0 and item.column >= 0 for item in items)
    columns: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for item in items:
        columns.setdefault((item.sequence, item.head), []).append((item.column, item.columns))
    assert set(columns) == set(product(range(n_sequences), range(plan.heads)))
    for spans in columns.values():
        end = 0
        for column, width in sorted(spans):
            assert column == end
            end += width
        assert end == plan.value_dim


def dealt(plan: Schedule) -> list[Item]:
    return [item for pid in range(plan.cores) for item in plan.core(pid)]


def check_makespan(plan: Schedule, lengths: list[int], cost: Cost) -> None:
    """The stated makespan is that of the items, with columns padded to the tile that computes them."""

    def padded(item: Item) -> int:
        whole = plan.split.parts == 1 or item.columns > plan.split.tile
        return plan.split.width if whole else plan.split.tile

    loads = [
        sum(cost(-(-lengths[item.sequence] // 64), padded(item)) for item in plan.core(pid))
        for pid in range(plan.cores)
    ]
    assert plan.makespan == max(loads)


def unit_costs(plan: Schedule, lengths: list[int], cost: Cost) -> list[int]:
    """Of whole units, longest first."""
    per_sequence = plan.heads * plan.split.blocks
    return sorted((cost(-(-n // 64), plan.split.width) for n in lengths for _ in range(per_sequence)), reverse=True)


def longest_first(costs: list[int], cores: int) -> int:
    loads = [0] * cores
    heapify(loads)
    for cost in costs:
        heapreplace(loads, loads[0] + cost)
    return max(loads)


@given(LENGTHS, HEADS, CORES, VALUE_DIMS, st.sampled_from([TILES, (64,), (32, 128), (16, 64, 256)]), COSTS)
def test_known_lengths(
    lengths: list[int], heads: int, cores: int, value_dim: int, tiles: tuple[int, ...], cost: Cost
) -> None:
    plan = schedule(lengths, heads, cores, value_dim=value_dim, tiles=tiles, cost=cost)
    items = dealt(plan)
    check_coverage(plan, len(lengths), items)
    for pid in range(cores):
        assert list(plan.core(pid)) == walk(plan, pid)
    check_makespan(plan, lengths, cost)
    assert {plan.split.width, plan.split.tile} <= set(tiles)

    costs = unit_costs(plan, lengths, cost)
    assert plan.bound == sum(costs) / cores
    assert plan.makespan <= plan.bound + max(costs, default=0)
    assert plan.makespan <= max(longest_first(costs, cores), plan.bound * 65 / 64)
    assert schedule(lengths, heads, cores, value_dim=value_dim, tiles=tiles, cost=cost) == plan
    assert planner.makespan(lengths, heads, cores, value_dim=value_dim, tiles=tiles, cost=cost) == plan.makespan

    if plan.tail is not None:
        assert plan.makespan > TAIL_FACTOR * plan.bound
        assert plan.tail.rest.makespan < plan.makespan
        assert all(lengths[item.sequence] > 64 * (cores - 1) for item in plan.tail.items)
        check_coverage(plan, len(lengths), [*plan.tail.items, *dealt(plan.tail.rest)])
        check_makespan(plan.tail.rest, lengths, cost)


@given(st.integers(0, 12), HEADS, CORES, VALUE_DIMS, st.one_of(st.none(), st.integers(0, 2**20)), COSTS)
def test_equal_or_unknown_lengths_need_no_table(
    n: int, heads: int, cores: int, value_dim: int, length: int | None, cost: Cost
) -> None:
    plan = equal_schedule(n, heads, cores, value_dim=value_dim, length=length, cost=cost)
    assert plan.order is None
    check_coverage(plan, n, dealt(plan))
    for pid in range(cores):
        assert list(plan.core(pid)) == walk(plan, pid)
    check_makespan(plan, [64 if length is None else length] * n, cost)
    if length is not None:
        assert schedule([length] * n, heads, cores, value_dim=value_dim, cost=cost).split == plan.split
        if plan.tail is not None:
            check_coverage(plan, n, [*plan.tail.items, *dealt(plan.tail.rest)])
            check_makespan(plan.tail.rest, [length] * n, cost)
    else:
        assert plan.tail is None


@given(st.integers(1, 80), CORES, COSTS)
def test_no_other_round_robin_split_of_equal_units_ends_earlier(units: int, cores: int, cost: Cost) -> None:
    best = min(
        max(
            len(range(pid, whole, cores)) * cost(1, 128)
            + len(range((pid - whole) % cores, (units - whole) * (128 // tile), cores)) * cost(1, tile)
            for pid in range(cores)
        )
        for tile in TILES
        for whole in range(units + 1)
    )
    assert equal_schedule(1, units, cores, value_dim=128, cost=cost).makespan == best


@given(st.lists(st.integers(1, 40), min_size=2, max_size=7), st.integers(1, 4))
def test_within_four_thirds_of_the_best_deal_of_whole_heads(chunks: list[int], cores: int) -> None:
    cost = COST
    best = min(
        max(sum(cost(c, 128) for c, on in zip(chunks, places, strict=True) if on == pid) for pid in range(cores))
        for places in product(range(cores), repeat=len(chunks))
    )
    plan = schedule([64 * c for c in chunks], 1, cores, value_dim=128, tiles=(128,))
    assert plan.makespan <= 4 / 3 * best


def test_the_papers_example() -> None:
    """Figure 9: 16 heads on 10 cores are 10 whole heads, heads 10 to 14 as column tiles, head 15 by chunks."""
    plan = equal_schedule(1, 16, 10, value_dim=128, length=4096)
    assert plan.makespan / plan.bound == pytest.approx(1.25)
    assert plan.tail is not None and plan.tail.items == (Item(0, 15, 0, 128),)
    rest = plan.tail.rest
    assert rest.bound == plan.bound * 15 / 16
    assert (rest.split.whole, rest.split.tile, rest.split.units) == (10, 64, 15)
    assert [list(rest.core(pid)) for pid in (0, 1, 9)] == [
        [Item(0, 0, 0, 128), Item(0, 10, 0, 64)],
        [Item(0, 1, 0, 128), Item(0, 10, 64, 64)],
        [Item(0, 9, 0, 128), Item(0, 14, 64, 64)],
    ]


@pytest.mark.parametrize(
    ("heads", "cores", "whole", "tile"),
    [
        (15, 10, 10, 64),  # five residual heads are ten tiles: one more round of tiles instead of one of heads
        (8, 20, 0, 64),  # nothing but tiles
        (5, 20, 0, 32),
        (16, 20, 16, 128),  # 32 tiles would be two rounds
        (20, 20, 20, 128),
        (32, 20, 32, 128),  # 24 tiles of 12 residual heads would be two rounds
        (1, 1, 1, 128),
    ],
)
def test_tiers_of_equal_heads(heads: int, cores: int, whole: int, tile: int) -> None:
    split = equal_schedule(1, heads, cores, value_dim=128).split
    assert (split.whole, split.tile) == (whole, tile)


def test_tiles_that_repeat_nothing_are_used_more_freely() -> None:
    split = equal_schedule(1, 16, 10, value_dim=128, cost=Cost(fixed=0)).split
    assert (split.whole, split.tile) == (10, 32)


def test_one_long_sequence_among_short_ones_is_cut() -> None:
    plan = schedule([2**20] + [64] * 40, 4, 20, value_dim=128)
    assert plan.order is not None
    long = [item for item in dealt(plan) if item.sequence == 0]
    assert len(long) == 4 * 4 and {item.columns for item in long} == {32}
    assert all(item.columns == 128 for item in dealt(plan) if item.sequence > 0)
    assert plan.tail is not None and {item.sequence for item in plan.tail.items} == {0}
    assert plan.tail.rest.makespan < plan.makespan / 100


def test_residual_heads_of_unequal_sequences_are_cut() -> None:
    """30 heads on 20 cores: the ten shortest become 20 tiles."""
    plan = schedule([64 * 100, 64 * 99], 15, 20, value_dim=128)
    assert Counter(item.columns for item in dealt(plan)) == {128: 20, 64: 20}
    assert {item.sequence for item in dealt(plan) if item.columns == 64} == {1}
    assert plan.makespan == 101 * 240 + 100 * 176


def test_a_short_tail_is_no_tail() -> None:
    assert equal_schedule(1, 3, 20, value_dim=128, length=64 * 20).tail is not None
    assert equal_schedule(1, 3, 20, value_dim=128, length=64 * 19).tail is None
    assert schedule([64 * 20, 1], 3, 20, value_dim=128).tail is not None
    assert schedule([64 * 19, 1], 3, 20, value_dim=128).tail is None


def test_no_tail_where_the_cores_are_almost_even() -> None:
    plan = equal_schedule(1, 26, 10, value_dim=128, length=4096)
    assert 1.1 < plan.makespan / plan.bound < TAIL_FACTOR and plan.tail is None
    plan = schedule([64 * 109, 64 * 49, 64 * 49], 1, 2, value_dim=128, tiles=(128,))
    assert 1 < plan.makespan / plan.bound < TAIL_FACTOR and plan.tail is None


def test_the_heads_outside_the_tail_end_earlier_than_all_would() -> None:
    """16 heads on 20 cores: 15 of them would fill three rounds of narrow tiles, which is later than 16 whole ones."""
    plan = equal_schedule(1, 16, 20, value_dim=128, length=4096)
    assert plan.tail is not None and plan.tail.rest.makespan < plan.makespan
    assert [item.head for item in plan.tail.items] == list(range(10, 16))


def test_no_tail_that_leaves_the_others_as_late() -> None:
    """Eleven equal units on ten cores take two rounds, with or without the long one."""
    plan = schedule([64 * 119] + [64 * 79] * 11, 1, 10, value_dim=128, tiles=(128,))
    assert plan.makespan == 1.6 * plan.bound and plan.tail is None


def test_heads_wider_than_every_tile_are_several_units() -> None:
    plan = equal_schedule(1, 2, 4, value_dim=256)
    assert (plan.split.width, plan.split.blocks, plan.split.units) == (128, 2, 4)
    assert [list(plan.core(pid)) for pid in range(4)] == [
        [Item(0, 0, 0, 128)],
        [Item(0, 0, 128, 128)],
        [Item(0, 1, 0, 128)],
        [Item(0, 1, 128, 128)],
    ]


def test_empty_sequences_are_dealt_and_spread() -> None:
    plan = schedule([0] * 40 + [64], 4, 20, value_dim=128)
    counts = Counter(len(list(plan.core(pid))) for pid in range(20))
    assert max(counts) <= 9, "8.2 on average"


def test_nothing_to_do() -> None:
    for plan in (schedule([], 16, 20, value_dim=128), equal_schedule(0, 16, 20, value_dim=128)):
        assert dealt(plan) == [] and plan.makespan == 0 and plan.order is None


def test_the_table_is_int32() -> None:
    order = schedule([64, 640], 3, 4, value_dim=128).order
    assert order is not None
    assert isinstance(order.ids, array) and order.ids.itemsize == order.bounds.itemsize == 4
    assert len(order.bounds) == 2 * 4 + 1 and order.bounds[-1] == len(order.ids)


@pytest.mark.parametrize("pattern", [lambda n: 977 * n % 8192, lambda n: 2**20 // (n + 1), lambda n: 2**20 - n])
def test_work_grows_with_sequences_and_not_with_their_heads(pattern) -> None:  # type: ignore[no-untyped-def]
    lengths = [pattern(n) for n in range(4096)]
    plan = schedule(lengths, 64, 20, value_dim=128)
    assert plan.makespan <= plan.bound * 65 / 64
    # Some 16 calls of functions for each sequence; one for each head would be 64 more.
    assert calls(schedule, lengths, 64, 20, value_dim=128) < 24 * 4096


def test_the_launchers_entry_is_cached() -> None:
    first = equal_schedule(3, 16, 20, value_dim=128)
    assert equal_schedule(3, 16, 20, value_dim=128, tiles=list(TILES)) is first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads must be positive, got 0"),
        ({"cores": 0}, "cores must be positive, got 0"),
        ({"value_dim": -1}, "value_dim must be positive, got -1"),
        ({"chunk": 0}, "chunk must be positive, got 0"),
        ({"tiles": ()}, "tiles must name at least one column tile, got none"),
        ({"tiles": (0,)}, "tiles must be positive, got 0"),
        ({"lengths": [3, -1]}, "lengths must not be negative, got -1"),
        ({"heads": 2**30}, r"heads must stay below 2\*\*31 items"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    arguments = {"lengths": [64, 128], "heads": 2, "cores": 2, "value_dim": 128, **change}
    with pytest.raises(ValueError, match=message):
        schedule(arguments.pop("lengths"), arguments.pop("heads"), arguments.pop("cores"), **arguments)


def test_bad_arguments_of_the_closed_form() -> None:
    with pytest.raises(ValueError, match="n_sequences must not be negative, got -1"):
        equal_schedule(-1, 2, 2, value_dim=128)
    with pytest.raises(ValueError, match="chunk must be positive, got 0"):
        equal_schedule(1, 2, 2, value_dim=128, chunk=0)
    with pytest.raises(TypeError):
        equal_schedule(1, 2.5, 2, value_dim=128)  # type: ignore[arg-type]
