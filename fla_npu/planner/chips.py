"""What is known of each Ascend chip, and from where: the one table that dispatch, schedule and compile check read.

A figure that no source gives is None. Sources are named per field in `Chip.sources`:

* `bishengir 1.2.0`: the target specification that the vendor's compiler writes into the module it compiles for this
  `--target` (`dlti.target_system_spec`), read for every target below;
* `paper`: HA-NPU (arXiv 2609.32114), Section 2.2 and Figure 2, and Section 7.1;
* `CANN`: the vendor's platform description of the chip (`platform_config/<chip>.ini`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

KIB = 1024

Family = Literal["A2", "A3", "A5", "310P", "310B"]
Compiler = Literal["bishengir-compile", "bishengir-compile-a5"]
VectorToCube = Literal["on_core", "global_memory"]


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second of the ways between memories, as one core sees them; None is unknown."""

    gm_to_l1: float | None = None
    ub_to_l1: float | None = None
    ub_to_gm_to_l1: float | None = None
    """The detour of a tensor that vector code made and a matrix product reads, where there is no way on the core."""


@dataclass(frozen=True)
class Rates:
    """Peak arithmetic of one AI core."""

    hertz: float
    macs_per_cycle: int
    """Of the matrix unit, 16-bit operands."""
    vector_bytes_per_cycle: int
    """Of one vector unit."""


@dataclass(frozen=True)
class Chip:
    """One chip. Sizes are bytes of one core's buffer; `ub_bytes` is that of one vector core."""

    name: str
    family: Family
    target: str | None
    """The vendor compiler's `--target`, None where it has none."""
    compiler: Compiler | None
    aicores: int
    """Cores with a matrix unit: the grid of a persistent kernel."""
    vector_cores: int
    """Vector cores that belong to those: two to a core, or one within it."""
    ub_bytes: int
    l1_bytes: int
    l0a_bytes: int
    l0b_bytes: int
    l0c_bytes: int | None
    vector_to_cube: VectorToCube
    """Which way a tensor takes between the vector and the matrix unit."""
    no_triton_reason: str | None
    sources: tuple[tuple[str, str], ...]
    bandwidths: Bandwidths | None = None
    rates: Rates | None = None

    @property
    def triton(self) -> bool:
        """Whether the Triton kernels are meant for this chip."""
        return self.no_triton_reason is None

    def source(self, field: str) -> str:
        """Where the figure of a field comes from.

        Raises:
            ValueError: the field has no figure with a source.
        """
        for fields, source in self.sources:
            if field in fields.split():
                return source
        raise ValueError(f"field must be a figure of {self.name} with a source, got {field!r}")


_SPEC = "bishengir 1.2.0"
_SIZES = "target aicores vector_cores ub_bytes l1_bytes l0a_bytes l0b_bytes l0c_bytes"

_A2 = Chip(
    name="910B3",
    family="A2",
    target="Ascend910B3",
    compiler="bishengir-compile",
    aicores=20,
    vector_cores=40,
    ub_bytes=192 * KIB,
    l1_bytes=512 * KIB,
    l0a_bytes=64 * KIB,
    l0b_bytes=64 * KIB,
    l0c_bytes=128 * KIB,
    vector_to_cube="global_memory",
    no_triton_reason=None,
    sources=(
        (_SIZES, _SPEC),
        ("vector_to_cube", f"{_SPEC}: fused kernels pass every such tensor through a workspace in global memory"),
    ),
)
_A5 = replace(
    _A2,
    name="950",
    family="A5",
    target="Ascend950PR_9599",
    compiler="bishengir-compile-a5",
    aicores=36,
    vector_cores=72,
    ub_bytes=248 * KIB,
    l0c_bytes=256 * KIB,
    vector_to_cube="on_core",
    sources=(
        (_SIZES, _SPEC),
        ("vector_to_cube", f"{_SPEC}: its programs copy L0C to UB and UB to L1"),
    ),
)
_310B = replace(
    _A5,
    name="310B1",
    family="310B",
    target="Ascend310B1",
    aicores=1,
    vector_cores=1,
    ub_bytes=256 * KIB,
    l1_bytes=1024 * KIB,
    l0c_bytes=128 * KIB,
    no_triton_reason="the vendor's compiler (1.2.0) crashes on the fused kernels for 310B",
    sources=((_SIZES, _SPEC), ("vector_to_cube", "paper, Figure 2 (Ascend 310 series)")),
)
_310P = Chip(
    name="310P",
    family="310P",
    target=None,
    compiler=None,
    aicores=10,
    vector_cores=10,
    ub_bytes=256 * KIB,
    l1_bytes=1024 * KIB,
    l0a_bytes=64 * KIB,
    l0b_bytes=64 * KIB,
    l0c_bytes=None,
    vector_to_cube="on_core",
    no_triton_reason="triton-ascend has no 310P target",
    bandwidths=Bandwidths(gm_to_l1=95e9, ub_to_l1=205e9, ub_to_gm_to_l1=48e9),
    sources=(
        ("aicores", "paper, Section 7.1"),
        ("vector_cores", "paper, Figure 2: a vector unit in each AI core; the stand-alone vector cores do not count"),
        ("ub_bytes l1_bytes l0a_bytes l0b_bytes", "paper, Figure 2"),
        ("vector_to_cube bandwidths", "paper, Section 2.2; whether of one core or of the chip is not said"),
    ),
)


def _with(chip: Chip, name: str, cores: int) -> Chip:
    """The same architecture with another number of cores."""
    ratio = chip.vector_cores // chip.aicores
    return replace(chip, name=name, target=f"Ascend{name}", aicores=cores, vector_cores=ratio * cores)


def _a3(name: str, cores: int) -> Chip:
    return replace(_with(_A2, name, cores), family="A3")


_ALL = (
    _310P,
    *(_with(_310B, f"310B{number}", 1) for number in (1, 2, 3, 4)),
    _with(_A2, "910B1", 24),
    _with(_A2, "910B2", 24),
    replace(
        _with(_A2, "910B2C", 24),
        bandwidths=Bandwidths(gm_to_l1=32 * 1.8e9),
        rates=Rates(hertz=1.8e9, macs_per_cycle=16**3, vector_bytes_per_cycle=128),
        sources=(
            *_A2.sources,
            ("rates", "CANN: cube_freq, cube_m/n/k_size, vec_calc_size; both units are taken to share the clock"),
            ("bandwidths", "CANN: ddr_read_rate, 32 bytes per cycle and core"),
        ),
    ),
    _A2,
    _with(_A2, "910B4", 20),
    _a3("910_9362", 20),
    replace(
        _a3("910_9363", 20),
        target=None,
        compiler=None,
        no_triton_reason="no published vendor compiler (up to 1.2.0) has the target Ascend910_9363",
        sources=(
            (_SIZES.removeprefix("target "), "the target table in the sources of AscendNPU-IR"),
            ("vector_to_cube", "as the other A3"),
        ),
    ),
    _a3("910_9372", 20),
    _a3("910_9381", 24),
    _a3("910_9382", 24),
    _a3("910_9391", 24),
    _a3("910_9392", 24),
    _A5,
    _with(_A5, "950PR_9589", 32),
    _with(_A5, "950PR_957c", 28),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _ALL})
"""Every chip by its name."""

_ALIASES = {
    "950pr_9599": "950",
    **{f"310p{number}": "310P" for number in (1, 3, 5, 7)},
    **{name.lower(): name for name in CHIPS},
}


def chip(name: str) -> Chip:
    """The chip of a name such as `910B3`, `Ascend910B3` (what a device reports) or `ascend310p3`, in any case.

    Raises:
        TypeError: the name is not a string.
        ValueError: no chip has this name; the message lists those that exist, the closest first.
    """
    if not isinstance(name, str):
        raise TypeError(f"chip name must be a str, got {type(name).__name__}")
    key = name.strip().lower().removeprefix("ascend").lstrip(" _-")
    if key not in _ALIASES:
        close = list(dict.fromkeys(_ALIASES[match] for match in get_close_matches(key, _ALIASES, n=6)))[:3]
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}, got {name!r}; {hint}".rstrip("; "))
    return CHIPS[_ALIASES[key]]
