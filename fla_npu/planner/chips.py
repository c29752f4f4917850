"""What is known of each Ascend chip, and from where: the one table that all that depends on a chip reads.

A figure that no source gives is None. Sources are named per figure in `Chip.sources`:

* `bishengir 1.2.0`: the target specification that the vendor's compiler writes into the module it compiles for this
  `--target` (`dlti.target_system_spec`), read for every target below;
* `paper`: HA-NPU (arXiv 2609.32114), Section 2.2 and Figure 2, and Section 7.1;
* `CANN`: the vendor's platform description of the chip (`platform_config/<chip>.ini`, CANN 9.0.0). Its rates are bytes
  per cycle: peaks, where the paper's are measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal

KIB = 1024

Family = Literal["A2", "A3", "A5", "310P", "310B"]
Compiler = Literal["bishengir-compile", "bishengir-compile-a5"]
VectorToCube = Literal["on_core", "global_memory"]
Dtype = Literal["fp16", "bf16", "fp32", "int8"]


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second of the ways between memories, as one AI core sees them; None is unknown, or no such way.

    A core with two vector cores moves through both at once: `gm_to_ub` and `ub_to_gm` are their sum.
    """

    gm_to_l1: float | None = None
    gm_to_ub: float | None = None
    ub_to_gm: float | None = None
    ub_to_l1: float | None = None
    ub_to_gm_to_l1: float | None = None
    """The detour of a tensor that vector code made and a matrix product reads, where there is no way on the core."""
    l1_to_ub: float | None = None
    l1_to_l0a: float | None = None
    l1_to_l0b: float | None = None
    l0c_to_ub: float | None = None
    l0c_to_gm: float | None = None
    l2_read: float | None = None
    """Of what the cache in front of global memory holds."""
    l2_write: float | None = None
    gm_total: float | None = None
    """Of the chip's memory, which all cores share."""


@dataclass(frozen=True)
class Rates:
    """Peak arithmetic of one AI core; None is unknown, or not taken."""

    hertz: float | None = None
    macs_per_cycle: int | None = None
    """Of the matrix unit, 16-bit operands."""
    fp32_macs_per_cycle: int | None = None
    """Of the matrix unit, 32-bit operands."""
    vector_bytes_per_cycle: int | None = None
    """Bytes of one operand in one vector unit."""


@dataclass(frozen=True)
class Chip:
    """One chip. Sizes are bytes of one core's buffer; `ub_bytes` is that of one vector core.

    Raises:
        ValueError: a figure without a source, a source without a figure, or figures that contradict each other.
    """

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
    matrix_dtypes: tuple[Dtype, ...]
    """What the matrix unit multiplies."""
    vector_dtypes: tuple[Dtype, ...]
    """What the vector unit adds; it may convert more."""
    no_triton_reason: str | None
    sources: tuple[tuple[str, str], ...]
    """Names of figures, separated by spaces, and their source. `bandwidths` covers every way not named on its own."""
    bandwidths: Bandwidths = Bandwidths()
    rates: Rates = Rates()
    board_watts: float | None = None
    """Most that a board draws, per chip."""

    def __post_init__(self) -> None:
        figures, named = self.figures(), self._named()
        for name, value in figures.items():
            if name not in named and name.partition(".")[0] not in named:
                raise ValueError(f"sources of {self.name} must name every figure, got none for {name}")
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{name} of {self.name} must be positive, got {value}")
        for name in named:
            if name not in figures and not any(figure.startswith(f"{name}.") for figure in figures):
                raise ValueError(f"sources of {self.name} must name its figures, got {name!r}, which it does not have")
        if (self.target is None) != (self.compiler is None):
            raise ValueError(f"{self.name} must have both a target and a compiler, got {self.target}, {self.compiler}")
        if self.triton and self.target is None:
            raise ValueError(f"{self.name} must have a target to run Triton kernels, got None")
        if self.vector_cores % self.aicores:
            raise ValueError(
                f"vector_cores of {self.name} must be a multiple of its {self.aicores} cores, got {self.vector_cores}"
            )
        if self.vector_to_cube == "global_memory":
            for way in ("ub_to_l1", "l1_to_ub", "l0c_to_ub"):
                if getattr(self.bandwidths, way) is not None:
                    raise ValueError(f"{self.name} must have no {way}: its units meet in global memory")
        if self.rates.fp32_macs_per_cycle is not None and "fp32" not in self.matrix_dtypes:
            raise ValueError(f"matrix_dtypes of {self.name} must have fp32, whose rate is given")

    @property
    def triton(self) -> bool:
        """Whether the Triton kernels are meant for this chip."""
        return self.no_triton_reason is None

    @property
    def vector_per_core(self) -> int:
        """Vector units to one matrix unit."""
        return self.vector_cores // self.aicores

    def figures(self) -> dict[str, Any]:
        """What is known and needs a source, by name: `ub_bytes`, `bandwidths.gm_to_l1`, ..., in the table's order."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _DESCRIBED or value is None:
                continue
            if is_dataclass(value):
                parts = {f"{field.name}.{part.name}": getattr(value, part.name) for part in fields(value)}
                found.update({name: part for name, part in parts.items() if part is not None})
            else:
                found[field.name] = value
        return found

    def source(self, field: str) -> str:
        """Where the figure of a field comes from.

        Args:
            field: a name in `figures()`.

        Raises:
            ValueError: the field has no figure with a source.
        """
        if field not in self.figures():
            raise ValueError(f"field must be a figure of {self.name} with a source, got {field!r}")
        named = self._named()
        return named.get(field) or named[field.partition(".")[0]]

    def _named(self) -> dict[str, str]:
        return {name: source for names, source in self.sources for name in names.split()}


_DESCRIBED = {"name", "family", "compiler", "no_triton_reason", "sources"}
"""Fields that say how this package treats a chip, not what was read somewhere."""


def _at(hertz: float, **bytes_per_cycle: float) -> Bandwidths:
    return Bandwidths(**{way: hertz * rate for way, rate in bytes_per_cycle.items()})


def _then(*rates: float) -> float:
    """The rate of ways taken one after the other."""
    return 1 / sum(1 / rate for rate in rates)


_SPEC = "bishengir 1.2.0"
_SIZES = "target aicores vector_cores ub_bytes l1_bytes l0a_bytes l0b_bytes l0c_bytes"
_CLOCK = "rates.hertz rates.macs_per_cycle"
_CANN_RATES = "CANN: cube_freq, cube_m/n/k_size"
_LANES = "CANN: vec_calc_size, 128 lanes of 16 bits"
_TIK = "the vendor's reference of TIK, vec_adds"
_DETOUR = "CANN: ub_to_l2_rate, then l2_read_rate, as the paper's 48 GB/s are UB to GM, then GM to L1"


def _a2_ways(hertz: float) -> Bandwidths:
    return _at(
        hertz,
        gm_to_l1=32,
        gm_to_ub=32,
        ub_to_gm=64,
        ub_to_gm_to_l1=_then(64, 110),
        l1_to_l0a=512,
        l1_to_l0b=256,
        l2_read=110,
        l2_write=86,
    )


def _a5_ways(hertz: float, memory: int) -> Bandwidths:
    half = (memory + 1) // 2
    return _at(
        hertz,
        gm_to_l1=memory,
        gm_to_ub=2 * half,
        ub_to_gm=2 * 40,
        ub_to_l1=128,
        ub_to_gm_to_l1=_then(2 * 42, 100),
        l1_to_ub=128,
        l1_to_l0a=256,
        l1_to_l0b=256,
        l0c_to_ub=128,
        l2_read=100,
        l2_write=100,
    )


def _310p_ways(hertz: float) -> Bandwidths:
    return _at(
        hertz,
        gm_to_l1=17,
        gm_to_ub=17,
        ub_to_gm=17,
        ub_to_l1=256,
        ub_to_gm_to_l1=_then(114, 114),
        l1_to_ub=128,
        l1_to_l0a=512,
        l1_to_l0b=256,
        l0c_to_ub=512,
        l2_read=114,
        l2_write=114,
    )


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
    matrix_dtypes=("fp16", "bf16", "fp32", "int8"),
    vector_dtypes=("fp16", "fp32"),
    no_triton_reason=None,
    rates=Rates(hertz=1.8e9, macs_per_cycle=16**3, vector_bytes_per_cycle=256),
    bandwidths=_a2_ways(1.8e9),
    sources=(
        (_SIZES, _SPEC),
        ("vector_to_cube", f"{_SPEC}: fused kernels pass every such tensor through a workspace in global memory"),
        ("matrix_dtypes", "CANN: Intrinsic_mmad, support_bf16"),
        ("vector_dtypes", "CANN: Intrinsic_vadd"),
        (_CLOCK, _CANN_RATES),
        ("rates.vector_bytes_per_cycle", f"{_LANES}; both units are taken to share the clock"),
        ("bandwidths", "CANN: ddr_read_rate and AICoreMemoryRates of 910B1, at this chip's clock"),
        ("bandwidths.ub_to_gm_to_l1", _DETOUR),
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
    vector_dtypes=("fp16", "bf16", "fp32"),
    rates=Rates(hertz=1.8e9, macs_per_cycle=16**3, fp32_macs_per_cycle=16 * 8 * 16, vector_bytes_per_cycle=256),
    bandwidths=replace(_a5_ways(1.8e9, memory=31), gm_total=1.6e12),
    sources=(
        (_SIZES, _SPEC),
        ("vector_to_cube", f"{_SPEC}: its programs copy L0C to UB and UB to L1"),
        ("matrix_dtypes", "CANN: Intrinsic_mmad, support_bf16"),
        ("vector_dtypes", "the vendor's white paper of the 950, Section 4.1.2"),
        (_CLOCK, _CANN_RATES),
        ("rates.fp32_macs_per_cycle", "CANN: DtypeMKN, DT_FLOAT"),
        ("rates.vector_bytes_per_cycle", f"{_LANES}; the white paper counts twice that, two instructions at a time"),
        (
            "bandwidths",
            "CANN: ddr_rate, of a vector core half of it; other rates of 950PR_9579, those of a vector core twice",
        ),
        ("bandwidths.ub_to_gm_to_l1", _DETOUR),
        ("bandwidths.gm_total", "the vendor at its 2025 conference: 950PR with 128 GB, 1.6 TB/s"),
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
    matrix_dtypes=("fp16", "fp32", "int8"),
    vector_dtypes=("fp16", "fp32", "int8"),
    no_triton_reason="the vendor's compiler (1.2.0) crashes on the fused kernels for 310B",
    rates=Rates(hertz=1.224e9, macs_per_cycle=16**3),
    bandwidths=_at(1.224e9, gm_to_l1=17, gm_to_ub=17),
    sources=(
        (_SIZES, _SPEC),
        ("vector_to_cube", "paper, Figure 2 (Ascend 310 series)"),
        ("matrix_dtypes", "CANN: DtypeMKN, no support_bf16; 32 bits from the vendor's reference of SetHF32Mode"),
        ("vector_dtypes", _TIK),
        (_CLOCK, _CANN_RATES),
        ("bandwidths", "CANN: ddr_rate"),
    ),
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
    l0c_bytes=256 * KIB,
    vector_to_cube="on_core",
    matrix_dtypes=("fp16", "int8"),
    vector_dtypes=("fp16", "fp32"),
    no_triton_reason="triton-ascend has no 310P target",
    rates=Rates(hertz=1.06e9, macs_per_cycle=16**3, vector_bytes_per_cycle=256),
    bandwidths=replace(
        _at(1.06e9, l2_read=114, l2_write=114),
        gm_to_l1=95e9,
        gm_to_ub=82e9,
        ub_to_gm=98e9,
        ub_to_l1=205e9,
        ub_to_gm_to_l1=48e9,
        l1_to_ub=117e9,
        l1_to_l0a=314e9,
        l1_to_l0b=117e9,
        l0c_to_ub=331e9,
        gm_total=204e9,
    ),
    sources=(
        ("aicores", "paper, Section 7.1; CANN: 310P1"),
        ("vector_cores", "paper, Figure 2: a vector unit in each AI core; the stand-alone vector cores do not count"),
        ("ub_bytes l1_bytes l0a_bytes l0b_bytes", "paper, Figure 2"),
        ("l0c_bytes", "CANN: l0_c_size"),
        ("vector_to_cube", "paper, Section 2.2"),
        ("matrix_dtypes", "CANN: DtypeMKN, no support_bf16; no 32 bits in the vendor's reference of SetHF32Mode"),
        ("vector_dtypes", _TIK),
        (_CLOCK, _CANN_RATES),
        ("rates.vector_bytes_per_cycle", _LANES),
        (
            "bandwidths.gm_to_l1 bandwidths.ub_to_l1 bandwidths.ub_to_gm_to_l1",
            "paper, Section 2.2; taken as one core's: the chip's memory gives a core 20 GB/s, its L2 121 GB/s (CANN)",
        ),
        ("bandwidths.ub_to_gm", "paper, Figure 2: the one label that makes the detour 48 GB/s after 95 GB/s"),
        ("bandwidths.gm_to_ub", "paper, Figure 2, assigned: the label next to that of the way back"),
        (
            "bandwidths.l1_to_l0a bandwidths.l0c_to_ub",
            "paper, Figure 2, assigned: only these two ways may pass 271 GB/s (CANN), as two labels do, 314 and 331; "
            "which is whose is open",
        ),
        (
            "bandwidths.l1_to_l0b bandwidths.l1_to_ub",
            "paper, Figure 2, assigned: of the labels that are left, 116, 117 and 117",
        ),
        ("bandwidths.l2_read bandwidths.l2_write", "CANN: l2_read_rate, l2_write_rate"),
        ("bandwidths.gm_total", "Atlas 300I Duo, two 310P chips: 408 GB/s"),
    ),
)


def _with(chip: Chip, name: str, cores: int, **changes: Any) -> Chip:
    """The same architecture with another number of cores."""
    ratio = chip.vector_per_core
    return replace(chip, name=name, target=f"Ascend{name}", aicores=cores, vector_cores=ratio * cores, **changes)


def _sourced(chip: Chip, *sources: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """The sources of a chip, with other ones for the figures that these name."""
    others = {name for names, _ in sources for name in names.split()}
    kept = []
    for names, source in chip.sources:
        left = [name for name in names.split() if not others & {name, name.partition(".")[0]}]
        if left:
            kept.append((" ".join(left), source))
    return (*kept, *sources)


def _a2(name: str, cores: int, hertz: float) -> Chip:
    return _with(_A2, name, cores, rates=replace(_A2.rates, hertz=hertz), bandwidths=_a2_ways(hertz))


def _a3(name: str, cores: int, hertz: float, gm_total: float | None = 1.6e12) -> Chip:
    chip = replace(_a2(name, cores, hertz), family="A3")
    if gm_total is None:
        return chip
    return replace(
        chip,
        bandwidths=replace(chip.bandwidths, gm_total=gm_total),
        sources=_sourced(
            chip,
            ("bandwidths.gm_total", "the vendor at its 2025 conference: 910C, 3.2 TB/s; a device is one of two dies"),
        ),
    )


def _310p(name: str, hertz: float) -> Chip:
    """A 310P with eight cores at a clock for which nothing was measured."""
    return replace(
        _310P,
        name=name,
        aicores=8,
        vector_cores=8,
        rates=replace(_310P.rates, hertz=hertz),
        bandwidths=replace(_310p_ways(hertz), gm_total=_310P.bandwidths.gm_total),
        sources=_sourced(
            _310P,
            ("aicores", "CANN: ai_core_cnt"),
            ("bandwidths", "CANN: AICoreMemoryRates, of the first 310P (Ascend710)"),
            ("bandwidths.ub_to_gm_to_l1", _DETOUR),
            ("bandwidths.gm_total", _310P.source("bandwidths.gm_total")),
        ),
    )


_ALL = (
    _310P,
    replace(
        _310P,
        name="310P3",
        aicores=8,
        vector_cores=8,
        board_watts=75,
        sources=_sourced(
            _310P, ("aicores", "CANN: ai_core_cnt"), ("board_watts", "Atlas 300I Duo, two 310P chips: 150 W")
        ),
    ),
    _310p("310P5", 0.8e9),
    _310p("310P7", 0.55e9),
    replace(
        _310B,
        bandwidths=Bandwidths(gm_to_l1=26.2e9, gm_to_ub=28.8e9, gm_total=42.5e9),
        sources=_sourced(
            _310B,
            (
                "bandwidths",
                "a public log of measurements on a 310B1 (CANN gives a core 20.8 GB/s): weights of a matrix product, "
                "a sum, a copy (read and write)",
            ),
        ),
    ),
    _with(_310B, "310B2", 1),
    _with(_310B, "310B3", 1),
    _with(_310B, "310B4", 1, rates=replace(_310B.rates, hertz=0.5e9), bandwidths=_at(0.5e9, gm_to_l1=8, gm_to_ub=8)),
    _a2("910B1", 24, 1.85e9),
    _a2("910B2", 24, 1.8e9),
    _a2("910B2C", 24, 1.8e9),
    _A2,
    _a2("910B4", 20, 1.5e9),
    _a3("910_9362", 20, 1.5e9, gm_total=None),
    replace(
        _a3("910_9363", 20, 1.5e9, gm_total=None),
        target=None,
        compiler=None,
        no_triton_reason="no published vendor compiler (up to 1.2.0) has the target Ascend910_9363",
        rates=Rates(),
        bandwidths=Bandwidths(),
        sources=(
            (_SIZES.removeprefix("target "), "the target table in the sources of AscendNPU-IR"),
            ("vector_to_cube matrix_dtypes vector_dtypes", "as the other A3"),
        ),
    ),
    _a3("910_9372", 20, 1.8e9),
    _a3("910_9381", 24, 1.8e9),
    _a3("910_9382", 24, 1.8e9),
    _a3("910_9391", 24, 1.85e9),
    _a3("910_9392", 24, 1.85e9),
    _A5,
    _with(
        _A5,
        "950PR_9589",
        32,
        rates=replace(_A5.rates, hertz=1.65e9),
        bandwidths=replace(_a5_ways(1.65e9, memory=31), gm_total=1.6e12),
    ),
    _with(
        _A5,
        "950PR_957c",
        28,
        rates=replace(_A5.rates, hertz=1.65e9),
        bandwidths=replace(_a5_ways(1.65e9, memory=27), gm_total=28 * 27 * 1.65e9),
        sources=_sourced(
            _A5,
            (
                "bandwidths.gm_total",
                "CANN: ddr_rate of all cores, which is the white paper's figure for 950PR with 32 and 28 cores",
            ),
        ),
    ),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _ALL})
"""Every chip by its name."""

_ALIASES = {
    "950pr_9599": "950",
    "310p1": "310P",
    **{name.lower(): name for name in CHIPS},
}

_FAMILIES = {"910b": "A2", "910c": "A3"}
"""What chips of several names are sold as: a device reports which of them it is."""


def chip(name: str) -> Chip:
    """The chip of a name such as `910B3`, `Ascend910B3` (what a device reports) or `ascend310p3`, in any case.

    Raises:
        TypeError: the name is not a string.
        ValueError: no chip has this name; the message lists those that exist and the closest, or a whole family.
    """
    if not isinstance(name, str):
        raise TypeError(f"chip name must be a str, got {type(name).__name__}")
    key = name.strip().lower().removeprefix("ascend").lstrip(" _-")
    if key not in _ALIASES:
        family = _FAMILIES.get(key, key.upper())
        close = [each.name for each in CHIPS.values() if each.family == family]
        if not close:
            close = list(dict.fromkeys(_ALIASES[match] for match in get_close_matches(key, _ALIASES, n=6)))[:3]
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}, got {name!r}; {hint}".rstrip("; "))
    return CHIPS[_ALIASES[key]]
