"""A part of what ships compiled anew and compared with the committed table; the whole of it is `make compile-all`."""

import pytest

from fla_npu.compiler import table
from fla_npu.compiler.api import compile_build
from fla_npu.ops.common.builds import shipped_calls

TABLE = table.load()
COMMITTED = table.by_key(TABLE)

GRID = [
    ("910B3", "chunk_gdn-bf16-K128-V128-exact-C64-BV128"),
    ("910B3", "chunk_gdn-bf16-K128-V128-fast-C64-BV128"),
    ("910B3", "chunk_gdn-fp16-K128-V128-fast-C64-BV128"),
    ("910B3", "chunk_kda-bf16-K128-V128-exact-C64-BV128"),
    ("910B3", "chunk_kda-bf16-K128-V128-exact-C64-BV128-unbounded"),
    ("910B3", "recurrent-gdn-softplus-bf16-K128-V128-VK-pool"),
    ("910B3", "recurrent-kda-bounded-bf16-K128-V128-VK-pool"),
    ("910B3", "gates-scalar-softplus-bf16-HV32-K1-C64-packed"),
    ("910B3", "gates-channel-softplus-bf16-HV16-K128-C64"),
    ("910B3", "norms-bf16-H16-K128-C64-packed"),
    ("910B1", "chunk_gdn-bf16-K128-V128-exact-C64-BV128"),
    ("910_9382", "chunk_gdn-bf16-K128-V128-exact-C64-BV128"),
]


@pytest.mark.parametrize(("chip", "name"), GRID)
def test_compiles_as_committed(chip, name):
    build, call = next((build, call) for build, call in shipped_calls(chip) if build.name == name)
    compiled = compile_build(build, chip, use_cache=False)
    row = table.row(compiled, call, "")
    assert row["problems"] == [] and row["scalar_loops"] == 0 and not row["retried"]
    assert row["split"] == ("none" if call is None else "held")
    assert table.worse(row, COMMITTED[name, chip]) == []


@pytest.mark.parametrize("chip", sorted({chip for _, chip in COMMITTED}))
def test_the_table_is_of_what_ships(chip):
    names = [build.name for build, _ in shipped_calls(chip)]
    missing = TABLE["missing"].get(chip, [])
    assert [name for name, of in COMMITTED if of == chip] == [name for name in names if name not in missing]
    assert set(missing) <= set(names)
