"""`python -m benchmarks.compiled`: compile everything that ships for every chip, and write the table of it.

Writes `fla_npu/compiler/shipped.json` and `docs/compiled.md` as results come. What the compiler has on disk
(`FLA_NPU_CACHE`) is not compiled again; rows that were not reached keep what the file says of them, with its date."""

import datetime
import queue
import re
import threading
import time
from pathlib import Path

import click

from fla_npu.compiler import bishengir, table
from fla_npu.compiler.api import compile_build
from fla_npu.compiler.build import KernelBuild
from fla_npu.compiler.lower import Lowerer
from fla_npu.compiler.table import ChunkCall

ROOT = Path(__file__).resolve().parent.parent
CHIPS = ("910B3", "910B1", "910_9382", "950")
"""One of each core count of A2 and A3, and A5."""

Work = tuple[KernelBuild, ChunkCall | None, str]


def work(chips: tuple[str, ...]) -> list[Work]:
    """Everything, the first chip first: the others differ in their number of cores, except for the last."""
    from fla_npu.ops.common.builds import shipped_calls

    return [(build, call, chip) for chip in chips for build, call in shipped_calls(chip)]


def merged(old: dict, rows: list[dict], wanted: list[Work]) -> dict:
    """The table with new rows: all of what ships, in its order, and nothing else."""
    known = {**table.by_key(old), **{(row["name"], row["chip"]): row for row in rows}}
    keys = [(build.name, chip) for build, _, chip in wanted]
    missing: dict[str, list[str]] = {}
    for name, chip in keys:
        if (name, chip) not in known:
            missing.setdefault(chip, []).append(name)
    return {
        "compiler": f"ascendnpu-ir {bishengir.version()}, triton-ascend 3.2.0",
        "missing": missing,
        "rows": [known[key] for key in keys if key in known],
    }


INTRODUCTION = """# What ships, compiled

Made by `make compile-all` (`python -m benchmarks.compiled`) from the programs that the vendor's compilers make, up to
the back end that only CANN ships. Nothing here was run on a device. `fla-npu compile --table` prints the same without
compiling, `fla-npu compile --op chunk_gdn --chip 910B3` compiles one. CI compiles a part of it anew and fails when a
figure is worse (`tests/compiler/test_shipped.py`).

A name says op, dtype, head dimensions of keys and values, precision, tokens of a chunk (C), columns of the state that a
program takes at once (BV), and what else differs from a plain call: tiles (T) for the last of some heads (HV), `gva`:
more value heads than key heads, `l2`: norms of q and k, `unbounded`: KDA gates without a lower bound, `vfirst`: states
with V first, `packed`: `cu_seqlens`, `zero`: no initial state.

Quantities are those of one chunk that is full and neither first nor last of its sequence:

* hand-offs between cube and vector cores, and how many the text of the loop has of each kind (both arms of a branch
  count there): `data`: a tile, `slot`: a buffer is free again, `scalar`: a handshake around a scalar;
* bytes of global memory: of the call's tensors (in, out), of the kernel's own tables (constants), and what goes through
  the workspace between cube and vector cores, both ways;
* bytes from L1 to L0, products, and elements of vector instructions, of both vector cores together.

UB, L1 and L0C: the highest byte used, of what there is.

* KDA reads more than the ideal: rows of gates that scores refer to are read again (7 of 64, and the last row), and both
  vector cores read all of beta, twice.
* Without a bound of its gates KDA has two bodies: `a strong chunk` decays so much that it goes in parts of 16 tokens.
* Tiles beside whole units are there for Gated DeltaNet only: both loops of KDA overflow UB (by 9 % with tiles of 64).
* On the 950 the chunk kernels do not compile with triton-ascend 3.2.0, whose front end knows no A5: it loses the split
  over the vector cores, so that they overflow UB; with chunks of 32 tokens and 64 or 32 columns at a time the compiler
  fails in a later stage ("BiShengSIMD pipeline"). The kernels on the vector cores do compile.

"""


def document(found: dict) -> str:
    return INTRODUCTION + table.text(found)


@click.command()
@click.option("--chip", "chips", multiple=True, default=CHIPS, show_default=True, help="Chip, repeatable.")
@click.option("--only", default="", help="Kernels whose name this regular expression finds.")
@click.option("--missing", is_flag=True, help="Only what the table has no row of.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Compilers at a time.")
@click.option("--minutes", type=float, default=float("inf"), help="Start nothing new after this time.")
def main(chips: tuple[str, ...], only: str, missing: bool, jobs: int, minutes: float) -> None:
    path = ROOT / "fla_npu" / "compiler" / "shipped.json"
    everything = work(CHIPS)
    old = table.load() if path.exists() else {"rows": []}
    known = set(table.by_key(old)) if missing else set()
    todo: queue.SimpleQueue[Work] = queue.SimpleQueue()
    for build, call, chip in everything:
        if chip in chips and re.search(only, build.name) and (build.name, chip) not in known:
            todo.put((build, call, chip))
    end = time.monotonic() + 60 * minutes
    rows: list[dict] = []
    lock = threading.Lock()

    def compile_all() -> None:
        with Lowerer() as lowerer:
            while time.monotonic() < end:
                try:
                    build, call, chip = todo.get_nowait()
                except queue.Empty:
                    return
                start = time.monotonic()
                compiled = compile_build(build, chip, lowerer=lowerer)
                row = table.row(compiled, call, datetime.date.today().isoformat())
                with lock:
                    rows.append(row)
                    found = merged(old, rows, everything)
                    path.write_text(table.dump(found))
                    (ROOT / "docs" / "compiled.md").write_text(document(found))
                    seconds = time.monotonic() - start
                    click.echo(f"{len(rows)} {row['name']} {chip}: {table.verdict(row)} ({seconds:.0f} s)")

    threads = [threading.Thread(target=compile_all) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
