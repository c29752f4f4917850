"""The five mappings: every operator runs once, what crosses global memory follows, and the figures of the sources."""

from collections import Counter

import pytest

from fla_npu.planner.dataflow import RECURRENCES, ChunkShape, semantic
from fla_npu.planner.mappings import NAMES, partition, segment_chunks, whole

KIB = 1024


@pytest.mark.parametrize("op", RECURRENCES)
@pytest.mark.parametrize("name", NAMES)
def test_every_operator_is_made_and_everything_read_is_there(op: str, name: str) -> None:
    part = partition(name, op)
    graph = part.graph
    made = Counter(one.output for stage in part.stages if stage.visits == "all" for one in stage.operators)
    if name != "separate":
        used = {one for one in graph.producer if graph.readers[one] or one in graph.outputs}
        assert used <= set(made) <= set(graph.producer)
        # Only gates are made again where another stage needs them.
        assert all(count == 1 or graph.producer[output].phase == "gate" for output, count in made.items())
    there = set(graph.inputs) if name != "separate" else set(graph.inputs) | {"S"}
    for stage in part.stages:
        own = {one.output for one in stage.operators}
        if name != "separate":
            for one in stage.operators:
                assert set(one.inputs) <= own | set(stage.reads) | ({"S"} if stage.carries else set())
        assert set(stage.reads) - set(stage.writes) <= there | set(part.stored), stage.name
        there |= set(stage.writes)
    assert "o" in there
    assert sum(stage.carries and stage.visits == "all" for stage in part.stages) == (name != "separate")


@pytest.mark.parametrize("op", RECURRENCES)
def test_head_moves_inputs_and_the_output_alone(op: str) -> None:
    (stage,) = partition("head", op).stages
    graph = partition("head", op).graph
    assert dict(stage.reads) == {name: graph.tensors[name].bytes for name in graph.inputs if name != "S"}
    assert dict(stage.writes) == {"o": graph.tensors["o"].bytes}


def test_fla_stores_what_its_kernels_store() -> None:
    """In FLA's sources: w, u, v_new, h and the inverse in 16 bits, the scores and the running gates in 32."""
    stored = partition("fla", "gdn").stored
    assert dict(stored) == {
        "S": 32 * KIB, "c": 256, "A": 16 * KIB, "T": 8 * KIB, "W": 16 * KIB, "U": 16 * KIB, "u": 16 * KIB,
    }  # fmt: skip
    kda = partition("fla", "kda")
    assert set(kda.stored) == {"S", "c", "T", "W", "U", "u", "P"}, "A stays on the core but for its diagonal"
    assert kda.stored["c"] == 32 * KIB
    assert [(one.name, one.bytes) for one in kda.extras] == [("diagonal of A", 4 * KIB)]


def test_megakernel_is_fla_in_one_launch() -> None:
    for op in RECURRENCES:
        fla, mega = partition("fla", op), partition("megakernel", op)
        assert [(one.reads, one.writes) for one in mega.stages] == [(one.reads, one.writes) for one in fla.stages]
        assert sum(one.submissions for one in mega.stages) == 1 < sum(one.submissions for one in fla.stages)


def test_flashqla_keeps_the_inverse_and_nothing_else_of_the_graph() -> None:
    assert dict(partition("flashqla", "gdn").stored) == {"T": 8 * KIB}
    assert dict(partition("flashqla", "gla").stored) == {}
    ahead = partition("flashqla", "kda").stages[1]
    assert "q" not in ahead.reads, "queries do not change the state"


def test_separate_counts_launches_like_the_sources() -> None:
    """vllm-ascend's PyTorch code: 63 rows of the solve at 6 launches, and a loop over chunks."""
    stages = partition("separate", "gdn").stages
    assert sum(one.submissions for one in stages if one.name == "T rows") == 63 * 6
    looped = sum(one.submissions for one in stages if one.looped)
    assert 12 <= looped <= 24
    assert not any(one.looped for one in stages if one.name in ("c", "A", "T", "W", "U"))


def test_whole_takes_any_form() -> None:
    assert whole(semantic("gdn")).stored == {}


@pytest.mark.parametrize(
    ("chunks", "heads", "cores", "expected"), [(64, 16, 10, 32), (1024, 32, 10, 128), (1, 1, 10, 4)]
)
def test_segments_as_in_the_sources(chunks: int, heads: int, cores: int, expected: int) -> None:
    assert segment_chunks(chunks, heads, cores) == expected


def test_sizes_follow_the_shape() -> None:
    part = partition("fla", "gdn", ChunkShape(C=32, K=64, V=256, dtype="bf16"))
    assert part.stored["S"] == 64 * 256 * 2
    assert part.stored["A"] == 32 * 32 * 4


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mapping must be one of separate, fla.*got 'heads'"):
        partition("heads", "gdn")
    with pytest.raises(ValueError, match=r"op must be one of gdn.*got 'rwkv'"):
        partition("head", "rwkv")
