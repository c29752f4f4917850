"""Where the tiles of a chunk live: which cross between the vector and the matrix units, in which layout, and where
that layout is made. One table for the kernel (`tiles.py` and `chunk_kernel.py` follow it), its documentation
(`docs/kernels.md`) and the compile test, which compares it with the hand-offs in the vendor compiler's program.
No triton.

Layouts: `dense` is row-major, as vector units and global memory have it; `blocked` is 16 rows of 32 bytes at a time,
as the matrix unit reads its operands. Tiles change layout where a copy passes anyhow, never by an instruction of their
own:

* dense -> blocked on the way from global memory into L1 (`nd2nz`), transposed operands included: `tl.trans` of an
  operand of `tl.dot` becomes a flag of the product, while a transposed load would be a gather;
* blocked -> dense on the way out of the accumulators (`fixpipe`), where float32 also becomes 16 bits if the next
  product takes 16 bits.

`enable_nd2nz_on_vector` stays off: the vector units would do the first of these by hand.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """A tile that crosses from one unit to the other, once per chunk."""

    name: str
    stage: str
    source: str
    """`vector` or `cube`; the other one reads it."""
    shape: str
    """In C, K and V, the sizes of the tiles (powers of two)."""
    operand: bool
    """Whether it has the dtype of the operands (float32 if `exact`, that of q if `fast`); float32 otherwise."""
    why: str


_SOLVE = (
    Tile("inner", "solve", "vector", "C C", True, "A within blocks of 8, negated"),
    Tile("outer", "solve", "vector", "C C", True, "A below these blocks, negated"),
    Tile("P", "output", "vector", "C C", True, "scores of q, decayed"),
)

TILES: dict[str, tuple[Tile, ...]] = {
    "scalar": (
        Tile("kk", "scores", "cube", "C C", False, "products of keys, to be decayed"),
        Tile("qk", "scores", "cube", "C C", False, "products of q and k, to be decayed"),
        *_SOLVE,
        Tile("from start, k", "read", "vector", "C C", True, "diagonal: decays of the rows of K S, negated"),
        Tile("from start, q", "read", "vector", "C C", True, "diagonal: decays of the rows of Q S, and the scale"),
        Tile("to end", "update", "vector", "C C", True, "diagonal: decays of the rows of u up to the next chunk"),
        Tile("decay", "update", "vector", "V V", False, "diagonal: decay of the chunk, for the state"),
    ),
    "channel": (
        *(
            tile
            for size in ("C", "C/2")
            for tile in (
                Tile(f"rows of {size}", "scores", "vector", "C K", True, "k, decayed from and to the middle of blocks"),
                Tile(f"columns of {size}", "scores", "vector", "C K", True, "the same with q in the upper halves"),
                Tile(f"square of {size}", "scores", "cube", "C C", False, "both kinds of scores, one transposed"),
            )
        ),
        Tile("piece, columns", "scores", "vector", "C K", True, "k, decayed to the middle of pieces"),
        Tile("piece, rows", "scores", "vector", "C K", True, "k, decayed from the middle of pieces"),
        Tile("piece, q", "scores", "vector", "C K", True, "q, decayed from the middle of pieces"),
        Tile("piece, kk", "scores", "cube", "C C", False, "scores of k within pieces"),
        Tile("piece, qk", "scores", "cube", "C C", False, "scores of q within pieces, transposed"),
        *_SOLVE,
        Tile("q from start", "read", "vector", "C K", True, "q, decayed from the start of the chunk, and the scale"),
        Tile("k from start", "read", "vector", "C K", True, "k, likewise, negated"),
        Tile("k to end", "update", "vector", "C K", True, "k, decayed up to the next chunk"),
        Tile("decay", "update", "vector", "K K", False, "diagonal: decays of the chunk, for the state"),
    ),
}
"""By kind of decay, for chunks of 64 and pieces of 16. All else stays where it is made: q, k and v (scalar decay) or v
(channel decay) and the identities go from global memory to the cube; K S, Q S, R, T and its powers, u and the state go
from one product to the next; q, k and the gates of channel decays go from global memory to the vectors."""


def table(decay: str) -> str:
    """The table in Markdown."""
    head = "| stage | tile | from | shape | dtype | what |\n|---|---|---|---|---|---|\n"
    return head + "\n".join(
        f"| {tile.stage} | {tile.name} | {tile.source} | {tile.shape.replace(' ', ' x ')} | "
        f"{'operand' if tile.operand else 'fp32'} | {tile.why} |"
        for tile in TILES[decay]
    )
