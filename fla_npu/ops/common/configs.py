"""Static choices of the chunk kernel: tile sizes and compiler options, and which go with which call. No torch."""

from dataclasses import asdict, dataclass, fields, replace


@dataclass(frozen=True)
class Config:
    """One way to compile the chunk kernel. Hashable and JSON-able: the key and the result of tuning."""

    chunk: int = 64
    """Tokens per chunk: 16, 32 or 64."""
    width: int = 128
    """Columns of the state that a whole unit takes at once: 32, 64 or 128."""
    tile: int = 0
    """Columns of a residual tile, 0 for no tiles."""
    multibuffer: bool = True
    set_workspace_multibuffer: int | None = None
    limit_auto_multi_buffer_only_for_local_buffer: bool | None = None
    unit_flag: bool | None = None

    def __post_init__(self) -> None:
        if self.chunk not in (16, 32, 64):
            raise ValueError(f"chunk must be 16, 32 or 64, got {self.chunk}")
        if self.width not in (16, 32, 64, 128):
            raise ValueError(f"width must be 16, 32, 64 or 128, got {self.width}")
        if self.tile not in (0, 16, 32, 64) or self.tile >= self.width:
            raise ValueError(f"tile must be 0 or a power of two from 16 on below width {self.width}, got {self.tile}")

    @property
    def tiles(self) -> tuple[int, ...]:
        """What the schedule may choose from."""
        return (self.tile, self.width) if self.tile else (self.width,)

    def with_sizes(self, chunk: int | None = None, width: int | None = None) -> "Config":
        """The same with other sizes, where given."""
        changed = replace(self, chunk=chunk or self.chunk, width=width or self.width)
        return changed if width is None else replace(changed, tile=0)

    def fit(self, V: int) -> "Config":
        """The same for V columns: no tile is wider than what they round up to."""
        width = min(self.width, tile_size(V))
        return replace(self, width=width, tile=self.tile if self.tile < width else 0)

    def options(self) -> dict[str, object]:
        """The launch options of the vendor's compiler."""
        names = [field.name for field in fields(self)][3:]
        return {name: value for name, value in asdict(self).items() if name in names and value is not None}


def piece_size(lower_bound: float | None, chunk: int) -> int:
    """Rows of a piece of a chunk whose scores have one reference, given the bound of log decays (None: unknown).

    Factors of the scores are at most `exp(piece / 2 |lower_bound|)` either way. `MILD` keeps the largest of them from
    overflowing and the smallest, times a small element of k, from underflowing.
    """
    piece = STRONG
    if lower_bound is not None:
        piece = chunk
        while piece > 1 and piece / 2 * abs(lower_bound) > MILD:
            piece //= 2
    return min(piece, chunk)


MILD = 44.0
"""Nats that half a piece may decay: `exp(44) = 2^63`. Of the 126 binades below 1 that float32 has, 63 are left for
the elements of k and q themselves."""


STRONG = 16
"""Tokens at a time where the decays of a chunk are too strong for one reference per piece."""


HALF = 128
"""Key channels that are computed with at a time: a state of more is two halves."""


def pad(size: int) -> int:
    """A head dimension as it is stored: rows of whole 32-byte lines in every dtype, which the device's copies need."""
    return -(-size // 16) * 16


def tile_size(size: int) -> int:
    """The power of two that a head dimension is computed with."""
    return max(16, 1 << (size - 1).bit_length())
