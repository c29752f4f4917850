"""The table of layouts is what the vendor's compiler made: the same tiles cross, once each."""

from collections import Counter
from pathlib import Path

import pytest

from fla_npu.ops.common.layouts import TILES, table

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
SIZES = {"C": 64, "K": 128, "V": 128}


def crossings(decay: str, operand: str) -> Counter:
    return Counter(
        (
            tile.source,
            "x".join([*(str(SIZES[name]) for name in tile.shape.split()), operand if tile.operand else "f32"]),
        )
        for tile in TILES[decay]
    )


@pytest.mark.parametrize(
    ("op", "decay", "precision", "operand"),
    [("chunk_gdn", "scalar", "fast", "bf16"), ("chunk_kda", "channel", "exact", "f32")],
)
def test_the_tiles_that_cross_are_those_of_the_table(op, decay, precision, operand):
    pytest.importorskip("triton.backends.ascend")
    pytest.importorskip("ascendnpuir")
    from fla_npu.compiler.api import compile_build
    from fla_npu.ops.common.builds import build_for

    compiled = compile_build(build_for(op, "910B3", precision=precision)[0], "910B3")
    found = Counter()
    for hand_off in compiled.hand_offs():
        source, target = hand_off.direction.split(" -> ")
        if source != target:
            assert not any(transfer.again for transfer in hand_off.transfers), str(hand_off)
            found.update((source, transfer.tile) for transfer in hand_off.transfers)
    assert found == crossings(decay, operand)


@pytest.mark.parametrize("decay", TILES)
def test_documentation_shows_the_table(decay):
    assert table(decay) in DOCS.read_text()
