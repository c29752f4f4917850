"""The committed table of what ships, compiled: what a row says, what counts as worse, and how it reads.

`shipped.json` beside this file has a row per kernel and chip, one a line. `python -m benchmarks.compiled` makes it
(hours; it needs the `compile` extra); reading it needs nothing. `tests/compiler/test_shipped.py` compiles a part of it
anew and compares.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from fla_npu.compiler.api import Compiled
from fla_npu.compiler.count import Totals
from fla_npu.compiler.evaluate import EvaluationError, Launch, Program, launch

Row = Mapping[str, Any]

CONSTANTS = ("eye", "marks")
"""How arguments begin that are tables of the kernel and no tensors of the call."""

TENSORS = ("q", "k", "v", "o", "c", "beta", "h0", "ht")
"""Arguments that every algorithm has to move; c are the gates."""

LAUNCHES = ((10, 2048), (32, 8192))
"""Heads and tokens of the launches whose traffic is in the table: those of the paper."""

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class ChunkCall(NamedTuple):
    """How a chunk kernel is evaluated: what `builds.build_for` gives besides the build, and what the call was."""

    op: str
    dtype: str
    K: int
    V: int
    scalars: Mapping[str, int]
    arrays: Mapping[str, Sequence[int]]
    grid: int
    has_h0: bool = True
    launches: bool = False
    """Whether its traffic in `LAUNCHES` goes into the table."""


def ideal_bytes(op: str, heads: int, seq: int, K: int, V: int, dtype: str, has_h0: bool = True) -> int:
    """Global memory traffic of a call with one key head per value head if every tensor is moved once (16-bit or
    float32 q, k, v, o; float32 gates, beta and states)."""
    gates = K if op == "chunk_kda" else 1
    states = K * V * (1 + has_h0)
    return heads * (seq * (2 * (K + V) * ITEM_BYTES[dtype] + 4 * (gates + 1)) + 4 * states)


def row(compiled: Compiled, call: ChunkCall | None, date: str) -> dict[str, Any]:
    """What the table says of one compiled build. call: how to evaluate it, None for kernels without a chunk loop."""
    report = compiled.report
    found: dict[str, Any] = {
        "name": report.name,
        "chip": report.chip,
        "compiler": report.compiler,
        "date": date,
        "verdict": report.verdict,
        "problems": list(report.problems),
    }
    if report.verdict != "passed" or report.unread:
        return found
    found |= {
        "split": report.split,
        "retried": report.retried,
        "scalar_loops": sum(loop.in_chunk_loop for loop in report.scalar_loops),
        "peak_bytes": dict(report.peak),
        "limit_bytes": dict(report.limit),
        "workspace_bytes": report.workspace,
    }
    if call is None:
        if report.chunk is not None:
            found["task"] = _chunk(report.chunk)
        return found
    found["hand_offs"] = dict(Counter(hand_off.kind for hand_off in compiled.hand_offs() if hand_off.kind != "none"))
    try:
        program = Program(compiled.module, compiled.arguments)
        found |= _figures(program, compiled, call)
    except EvaluationError as error:
        found["not_evaluated"] = str(error)
        if report.chunk is not None:
            found["chunk"] = _chunk(report.chunk)
    return found


def _figures(program: Program, compiled: Compiled, call: ChunkCall) -> dict[str, Any]:
    constants = compiled.build.constants
    chunk = constants["C"]
    assert isinstance(chunk, int)
    found: dict[str, Any] = {"chunk": _chunk(_one_chunk(program, call, chunk))}
    if constants["MAY_BE_STRONG"]:
        found["strong_chunk"] = _chunk(_one_chunk(program, call, chunk, strong=True))
    if constants["PARTS"] != 1:
        # All tiles of one unit together.
        found["tiled_chunk"] = _chunk(_one_chunk(program, call, chunk, tiled=True))
    if call.launches:
        found["launches"] = [_launch(program, call, heads, seq, chunk) for heads, seq in LAUNCHES]
    return found


def _one_chunk(program: Program, call: ChunkCall, chunk: int, *, strong: bool = False, tiled: bool = False) -> Totals:
    """One full chunk that is neither a sequence's first nor its last, by what a sequence longer by it takes more."""

    def head(chunks: int) -> Totals:
        given = _given(call, heads=1, seq=chunks * chunk, strong=strong)
        return program.launch_totals(launch(1, {**given.scalars, "whole": 0 if tiled else 1}, given.arrays))

    longer = Counter(head(3).counts)
    longer.subtract(head(2).counts)
    return Totals({key: value for key, value in longer.items() if value})


def _given(call: ChunkCall, *, heads: int, seq: int, strong: bool = False) -> Launch:
    """The arguments of a launch of the first heads. Heads that lie further apart do not change what is moved."""
    scalars = {**call.scalars, "T": seq}
    blocks = call.scalars["units"] // call.scalars["heads"]
    scalars["units"] = scalars["whole"] = heads * blocks
    del scalars["heads"]
    arrays: dict[str, Sequence[int]] = dict(call.arrays)
    if "cu_seqlens" in arrays:
        arrays["cu_seqlens"] = (0, seq)
    if "is_strong" in arrays:
        arrays["is_strong"] = [int(strong)] * len(arrays["is_strong"])
    return launch(call.grid, scalars, arrays)


def _launch(program: Program, call: ChunkCall, heads: int, seq: int, chunk: int) -> dict[str, Any]:
    totals = program.launch_totals(_given(call, heads=heads, seq=seq))
    moved = {name: ways["read"] + ways["write"] for name, ways in totals.arguments.items()}
    tensors = sum(moved.get(name, 0) for name in TENSORS)
    ideal = ideal_bytes(call.op, heads, seq, call.K, call.V, call.dtype, call.has_h0)
    return {
        "heads": heads,
        "seq": seq,
        "bytes": moved,
        "tensor_bytes": tensors,
        "ideal_bytes": ideal,
        "ratio": round(tensors / ideal, 4),
        "workspace_bytes": totals.workspace,
        "l1_to_l0_bytes": totals.l1_to_l0,
        "macs": totals.macs,
        "vector_elements": totals.vector_elements,
    }


def _chunk(totals: Totals) -> dict[str, Any]:
    tensors = {name: ways for name, ways in totals.arguments.items() if not name.startswith(CONSTANTS)}
    return {
        "syncs": totals.syncs,
        "read_bytes": {name: ways["read"] for name, ways in tensors.items() if ways["read"]},
        "written_bytes": {name: ways["write"] for name, ways in tensors.items() if ways["write"]},
        "constant_bytes": totals.user_read + totals.user_written - sum(sum(ways.values()) for ways in tensors.values()),
        "workspace_bytes": totals.workspace,
        "l1_to_l0_bytes": totals.l1_to_l0,
        "macs": totals.by("macs"),
        "vector_elements": totals.vector_elements,
    }


def figures(found: Row) -> dict[str, int]:
    """The numbers of a row of which less is better, by name."""
    numbers = {f"{memory} peak": value for memory, value in found.get("peak_bytes", {}).items()}
    if "workspace_bytes" in found:
        numbers["workspace of a program"] = found["workspace_bytes"]
        numbers["scalar loops in the chunk loop"] = found["scalar_loops"]
    for kind in ("chunk", "strong_chunk", "tiled_chunk", "task"):
        if kind in found:
            chunk, of = found[kind], f"of a {kind.replace('_', ' ')}"
            numbers |= {
                f"hand-offs {of}": chunk["syncs"],
                f"bytes read {of}": sum(chunk["read_bytes"].values()),
                f"bytes written {of}": sum(chunk["written_bytes"].values()),
                f"constants {of}": chunk["constant_bytes"],
                f"workspace bytes {of}": chunk["workspace_bytes"],
                f"L1 -> L0 bytes {of}": chunk["l1_to_l0_bytes"],
                f"MACs {of}": sum(chunk["macs"].values()),
                f"vector elements {of}": chunk["vector_elements"],
            }
    return numbers


def worse(new: Row, committed: Row) -> list[str]:
    """How a freshly compiled row is worse than the committed one; empty if it is not."""
    found = [f"new problem: {problem}" for problem in new["problems"] if problem not in committed["problems"]]
    if new["verdict"] != "passed" or committed["verdict"] != "passed":
        return found if new["verdict"] == committed["verdict"] else [*found, f"verdict {new['verdict']}"]
    numbers, old = figures(new), figures(committed)
    missing = sorted(set(old) - set(numbers))
    found += [f"no longer counted: {name}" for name in missing]
    return found + [
        f"{name}: {value:,} instead of {old[name]:,}"
        for name, value in numbers.items()
        if name in old and value > old[name]
    ]


def load() -> dict[str, Any]:
    """The committed table."""
    text = resources.files("fla_npu.compiler").joinpath("shipped.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def dump(table: Mapping[str, Any]) -> str:
    """A table as JSON, one row a line, so that changes can be read."""
    head = json.dumps({name: value for name, value in table.items() if name != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(found, sort_keys=True)}" for found in table["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def by_key(table: Mapping[str, Any]) -> dict[tuple[str, str], Row]:
    """The rows by kernel and chip."""
    return {(found["name"], found["chip"]): found for found in table["rows"]}


def verdict(found: Row) -> str:
    """The row in a few words."""
    return "; ".join(found["problems"]) or "ok"


_HEADS = (
    "kernel", "UB", "L1", "L0C", "split", "hand-offs", "in the loop's text", "in", "out", "constants", "workspace",
    "L1 to L0", "MACs", "vector elements", "result",
)  # fmt: skip


def cells(found: Row) -> list[tuple[str, ...]]:
    """A row of the table for people, one for each kind of chunk; quantities in bytes are those of a chunk."""
    used = [
        f"{found['peak_bytes'][memory] / found['limit_bytes'][memory]:.0%}"
        if memory in found.get("peak_bytes", {})
        else "-"
        for memory in ("UB", "L1", "L0C")
    ]
    lines = []
    for kind, label in (("chunk", ""), ("strong_chunk", ", a strong chunk"), ("tiled_chunk", ", a chunk in tiles")):
        chunk = found.get(kind)
        if chunk is None and label:
            continue
        numbers = ["-"] * 9
        if chunk is not None:
            read, written = sum(chunk["read_bytes"].values()), sum(chunk["written_bytes"].values())
            kinds = ", ".join(f"{count} {name}" for name, count in sorted(found["hand_offs"].items()))
            numbers = [str(chunk["syncs"]), kinds] + [
                f"{n:,}"
                for n in (
                    read, written, chunk["constant_bytes"], chunk["workspace_bytes"],
                    chunk["l1_to_l0_bytes"], sum(chunk["macs"].values()), chunk["vector_elements"],
                )
            ]  # fmt: skip
        lines.append((found["name"] + label, *used, found.get("split", "-"), *numbers, verdict(found)))
    return lines


def _small_cells(found: Row) -> tuple[str, ...]:
    """The row of a kernel on the vector cores; quantities are those of its innermost loop over tasks."""
    numbers = ["-"] * 3
    if "task" in found:
        task = found["task"]
        sizes = (sum(task["read_bytes"].values()), sum(task["written_bytes"].values()), task["vector_elements"])
        numbers = [f"{n:,}" for n in sizes]
    return (found["name"], cells(found)[0][1], *numbers, verdict(found))


def markdown_table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    rows = [list(heads), *(list(line) for line in lines)]
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in rows)


def text(table: Mapping[str, Any], chips: Sequence[str] = ()) -> str:
    """The table for a terminal or, as it is Markdown, for `docs/compiled.md`."""
    names = list(dict.fromkeys(found["chip"] for found in table["rows"]))
    parts = []
    for name in names:
        if chips and name not in chips:
            continue
        rows = [found for found in table["rows"] if found["chip"] == name]
        dates = sorted(found["date"] for found in rows)
        fine = sum(not found["problems"] for found in rows)
        heading = f"## {name}\n\n{rows[0]['compiler']}, {dates[0]}"
        heading += f" to {dates[-1]}" if dates[-1] != dates[0] else ""
        missing = table["missing"].get(name, [])
        heading += f": {fine} of {len(rows)} without problems"
        heading += f"; {len(missing)} are not compiled yet." if missing else "."
        parts.append(heading)
        loops = [found for found in rows if "chunk" in found or found["name"].startswith("chunk")]
        if loops:
            parts.append(markdown_table(_HEADS, (line for found in loops for line in cells(found))))
        launches = [(found, one) for found in loops for one in found.get("launches", ())]
        if launches:
            parts.append("Whole launches, in MiB:")
            parts.append(markdown_table(*_launch_table(launches)))
        small = [found for found in rows if found not in loops]
        if small:
            parts.append("Kernels on the vector cores, of one round of the loop over tasks (or tokens):")
            parts.append(
                markdown_table(
                    ("kernel", "UB", "in", "out", "vector elements", "result"), (_small_cells(found) for found in small)
                )
            )
    return "\n\n".join(parts) + "\n"


def _launch_table(launches: Sequence[tuple[Row, Row]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads = (
        "kernel", "heads", "tokens", "q, k, v, o, gates, beta, states", "ideal", "ratio", "constants", "workspace",
        "L1 to L0", "GMAC",
    )  # fmt: skip
    lines = []
    for found, one in launches:
        constants = sum(value for name, value in one["bytes"].items() if name.startswith(CONSTANTS))
        sizes = [
            f"{n / 2**20:.2f}"
            for n in (one["tensor_bytes"], one["ideal_bytes"], constants, one["workspace_bytes"], one["l1_to_l0_bytes"])
        ]
        ratio, gmac = f"{one['ratio']:.3f}", f"{one['macs'] / 1e9:.2f}"
        lines.append(
            (found["name"], str(one["heads"]), f"{one['seq']:,}", *sizes[:2], ratio, *sizes[2:], gmac),
        )
    return heads, lines
