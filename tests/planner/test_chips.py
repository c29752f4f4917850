import dataclasses
import subprocess
import sys

import pytest

from fla_npu.planner import chips, schedule
from fla_npu.planner.chips import CHIPS, Chip, chip


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
        ("Ascend 310P3", "310P"),
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
    with pytest.raises(ValueError, match=r"got 'H200'$"):
        chip("H200")
    with pytest.raises(TypeError, match="chip name must be a str, got int"):
        chip(910)  # type: ignore[arg-type]


@pytest.mark.parametrize("one", CHIPS.values(), ids=CHIPS)
def test_every_figure_has_a_source(one: Chip) -> None:
    described = {"name", "family", "compiler", "no_triton_reason", "sources"}
    for field in dataclasses.fields(one):
        if field.name not in described and getattr(one, field.name) is not None:
            assert one.source(field.name)


def test_a_field_without_a_figure_has_no_source() -> None:
    with pytest.raises(ValueError, match="figure of 310P with a source, got 'l0c_bytes'"):
        chip("310P").source("l0c_bytes")


@pytest.mark.parametrize("one", CHIPS.values(), ids=CHIPS)
def test_rows_agree_with_themselves(one: Chip) -> None:
    assert one == CHIPS[one.name]
    assert (one.target is None) == (one.compiler is None)
    assert one.triton == (one.no_triton_reason is None)
    assert one.target is not None or not one.triton, "a kernel needs a target to be compiled for"
    per_core = {"A2": 2, "A3": 2, "A5": 2, "310P": 1, "310B": 1}[one.family]
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
