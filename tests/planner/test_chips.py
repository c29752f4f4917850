import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fla_npu.planner import chips, schedule
from fla_npu.planner.chip_table import table
from fla_npu.planner.chips import CHIPS, Bandwidths, Chip, Rates, chip


@pytest.mark.parametrize(
    ("name", "cores", "target"),
    [
        ("910B1", 24, "Ascend910B1"),
        ("910B3", 20, "Ascend910B3"),
        ("910B4", 20, "Ascend910B4"),
        ("910_9362", 20, "Ascend910_9362"),
        ("910_9392", 24, "Ascend910_9392"),
        ("950", 36, "Ascend950PR_9599"),
        ("310B4", 1, "Ascend310B4"),
        ("310P", 10, None),
        ("310P3", 8, None),
    ],
)
def test_cores_and_targets(name: str, cores: int, target: str | None) -> None:
    assert (chip(name).aicores, chip(name).target) == (cores, target)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("910B3", "910B3"),
        ("Ascend910B3", "910B3"),
        ("ascend910b3", "910B3"),
        ("ASCEND910_9382", "910_9382"),
        ("Ascend 310P1", "310P"),
        ("Ascend310P3", "310P3"),
        ("Ascend950PR_9599", "950"),
        ("ascend950pr_957C", "950PR_957c"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert chip(spelling) is CHIPS[name]


def test_unknown_name_lists_chips_and_close_matches() -> None:
    with pytest.raises(ValueError, match=r"one of 310P, .*got '910B9'; did you mean 910B\d") as caught:
        chip("910B9")
    assert all(name in str(caught.value) for name in CHIPS)
    with pytest.raises(ValueError, match=r"did you mean 910_9362 or .* or 910_9392\?$"):
        chip("Ascend 910C")  # what an A3 is sold as
    with pytest.raises(ValueError, match=r"did you mean 910B1 or .* or 910B4\?$"):
        chip("A2")
    with pytest.raises(ValueError, match=r"got 'H200'$"):
        chip("H200")
    with pytest.raises(TypeError, match="chip name must be a str, got int"):
        chip(910)  # type: ignore[arg-type]


@pytest.mark.parametrize("one", CHIPS.values(), ids=CHIPS)
def test_every_figure_has_a_source(one: Chip) -> None:
    figures = one.figures()
    described = {"name", "family", "compiler", "no_triton_reason", "sources", "bandwidths", "rates"}
    names = {field.name for field in dataclasses.fields(one)} - described
    assert {name for name in figures if "." not in name} == {name for name in names if getattr(one, name) is not None}
    for group in (one.bandwidths, one.rates):
        kind = type(group).__name__.lower()
        known = {f"{kind}.{name}" for name, value in dataclasses.asdict(group).items() if value is not None}
        assert {name for name in figures if name.startswith(f"{kind}.")} == known
    assert all(one.source(name) for name in figures)


def test_source_of_one_way() -> None:
    one = chip("310P")
    assert one.source("bandwidths.ub_to_l1").startswith("paper, Section 2.2")
    assert one.source("bandwidths.l2_read").startswith("CANN")
    assert chip("910B3").source("bandwidths.gm_to_l1").startswith("CANN: ddr_read_rate")
    assert "48 GB/s" in chip("910B3").source("bandwidths.ub_to_gm_to_l1"), "its own source goes before that of all ways"


@pytest.mark.parametrize("field", ["board_watts", "bandwidths.l0c_to_gm", "bandwidths", "rates.", "speed"])
def test_a_field_without_a_figure_has_no_source(field: str) -> None:
    with pytest.raises(ValueError, match=f"figure of 310P with a source, got '{field}'"):
        chip("310P").source(field)


def test_paper_figures() -> None:
    ways = chip("310P").bandwidths
    assert (ways.gm_to_l1, ways.ub_to_l1, ways.ub_to_gm_to_l1) == (95e9, 205e9, 48e9)
    assert ways.ub_to_gm is not None
    assert 1 / (1 / ways.ub_to_gm + 1 / 95e9) == pytest.approx(48e9, rel=0.01), "why this label is the way back"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("310P", 86.8352),
        ("310P3", 69.46816),
        ("310B4", 4.096),
        ("910B3", 294.912),
        ("910_9392", 363.7248),
        ("950", 530.8416),
        ("950PR_957c", 378.4704),
    ],
)
def test_peak_of_matrix_units(name: str, tflops: float) -> None:
    """As CANN 9.0.0 counts them, from its own clock, cores and cube shape."""
    one = chip(name)
    assert one.rates.hertz is not None
    assert one.rates.macs_per_cycle is not None
    assert 2 * one.aicores * one.rates.hertz * one.rates.macs_per_cycle / 1e12 == pytest.approx(tflops, rel=1e-6)


def bare(**changes: Any) -> Chip:
    """A chip with `changes`, whose figures, and no others, have a source."""
    one = dataclasses.replace(chip("910B3"), bandwidths=Bandwidths(), rates=Rates(), sources=tuple(SIZES.items()))
    sources = {**SIZES, **{name: "somewhere" for name in changes if name in ("bandwidths", "rates")}}
    return dataclasses.replace(one, **{"sources": tuple(sources.items()), **changes})


SIZES = {
    "target": "somewhere",
    "aicores vector_cores ub_bytes l1_bytes l0a_bytes l0b_bytes l0c_bytes": "somewhere",
    "vector_to_cube matrix_dtypes vector_dtypes": "somewhere",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compiler": None}, "must have both a target and a compiler, got Ascend910B3, None"),
        ({"target": None, "compiler": None, "sources": tuple(SIZES.items())[1:]}, "must have a target to run Triton"),
        ({"target": None, "compiler": None}, "must name its figures, got 'target', which it does not have"),
        ({"board_watts": 300.0}, "must name every figure, got none for board_watts"),
        ({"vector_cores": 41}, "vector_cores of 910B3 must be a multiple of its 20 cores, got 41"),
        ({"ub_bytes": 0}, "ub_bytes of 910B3 must be positive, got 0"),
        ({"rates": Rates(hertz=-1.0)}, "rates.hertz of 910B3 must be positive, got -1.0"),
        ({"bandwidths": Bandwidths(ub_to_l1=1e9)}, "must have no ub_to_l1: its units meet in global memory"),
        ({"matrix_dtypes": ("fp16",), "rates": Rates(fp32_macs_per_cycle=1024)}, "must have fp32, whose rate is given"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    assert bare().name == "910B3", "what the changes start from is a chip"
    with pytest.raises(ValueError, match=message):
        bare(**changes)


@pytest.mark.parametrize("one", CHIPS.values(), ids=CHIPS)
def test_rows_agree_with_themselves(one: Chip) -> None:
    assert one == CHIPS[one.name]
    assert (one.target is None) == (one.compiler is None)
    assert one.triton == (one.no_triton_reason is None)
    assert one.target is not None or not one.triton, "a kernel needs a target to be compiled for"
    per_core = {"A2": 2, "A3": 2, "A5": 2, "310P": 1, "310B": 1}[one.family]
    assert one.vector_per_core == per_core
    assert one.vector_cores == per_core * one.aicores
    assert (one.vector_to_cube == "global_memory") == (one.family in ("A2", "A3"))
    assert hash(one) == hash(dataclasses.replace(one)), "a chip is a cache key"


def test_frozen() -> None:
    with pytest.raises(TypeError):
        CHIPS["910B5"] = chip("910B4")  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip("910B4").aicores = 21  # type: ignore[misc]


def test_needs_neither_torch_nor_triton_of_its_own() -> None:
    """The planner's own imports: `fla_npu` itself loads torch, so the modules are loaded without their package."""
    code = (
        "import importlib.util as u, sys\n"
        "for path in sys.argv[1:]:\n"
        "    spec = u.spec_from_file_location('m', path); m = u.module_from_spec(spec); sys.modules['m'] = m\n"
        "    spec.loader.exec_module(m)\n"
        "assert not {'torch', 'triton', 'torch_npu', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, chips.__file__, schedule.__file__], check=True)


def test_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "chips.md"
    assert page.read_text() == table(), "write planner.chip_table.table() to docs/chips.md"
