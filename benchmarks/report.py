"""The Markdown summary of a run. It contains nothing that is not in the JSON rows."""

from __future__ import annotations

from benchmarks.registry import BY_NAME, IMPLEMENTATIONS, MODES, OPS, OURS, Case
from benchmarks.rows import OK, case_of, gemm_rate

TITLES = {"gdn": "Gated DeltaNet", "kda": "Kimi Delta Attention"}
BUSY_CORES = 0.1
"""Other processes taking more than this are reported: two threads on two cores feel them at once."""


def summary(timings: dict, memory: dict) -> str:
    blocks = ["# Benchmark results", provenance(timings["runs"] or memory["runs"])]
    if timings["rows"]:
        blocks.append(
            "Cells are the median time of one call and, in brackets, that time over fla_npu's: `(3.0x)` is a peer "
            "that takes three times as long. The GEMMs are not a peer but a bound: the algorithm's matrix products "
            "alone. The spread is the range of fla_npu's samples over their median. GFLOP/s counts the products of the "
            "chunked algorithm."
        )
    for mode in MODES:
        for op in OPS:
            blocks += timing_section(op, mode, timings["rows"])
    blocks += memory_section(memory["rows"])
    blocks += gate_section(timings["rows"])
    blocks += absent_section(timings["rows"] + memory["rows"])
    return "\n\n".join(blocks) + "\n"


def provenance(runs: list[dict]) -> str:
    if not runs:
        return "No run yet."
    lines = []
    for number, run in enumerate(runs):
        machine = run["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        lines.append(
            f"* Run {number}, {run['date']}, grid {run['grid']}, commit {run['commit']}: {machine['cpu']}, "
            f"{machine['cores']} cores ({', '.join(machine['features'])}), {machine['memory_gb']} GB, "
            f"{machine['system']}; {versions}; OMP_WAIT_POLICY {run['omp_wait_policy']}."
        )
    return "\n".join(lines)


def timing_section(op: str, mode: str, records: list[dict]) -> list[str]:
    records = [record for record in records if (record["op"], record["mode"]) == (op, mode)]
    if not records:
        return []
    present = {record["implementation"] for record in records}
    peers = [one for one in IMPLEMENTATIONS if one.name in present and one.name != OURS]
    header = ["B", "T", "heads", "D", "dtype", "threads", "fla_npu", "spread", "GFLOP/s"]
    if mode == "decode":
        header.remove("GFLOP/s")
    lines, busy = [], False
    for case, threads in dict.fromkeys((case_of(record), record["threads"]) for record in records):
        here = {
            record["implementation"]: record
            for record in records
            if case_of(record) == case and record["threads"] == threads
        }
        ours = here.get(OURS)
        cells = [*shape_cells(case), str(threads), time_cell(ours)]
        measured = ours is not None and ours["status"] == OK
        cells.append(f"{ours['spread']:.0%}" if measured else "")
        if mode != "decode":
            cells.append(f"{gemm_rate(ours):.0f}" if measured else "")
        cells += [time_cell(here.get(peer.name), ours) for peer in peers]
        if any(record.get("other_cores", 0) > BUSY_CORES for record in here.values()):
            cells[0], busy = cells[0] + " \\*", True
        lines.append(cells)
    block = [f"## {TITLES[op]}, {mode}", table(header + [one.label for one in peers], lines)]
    if busy:
        block.append(f"\\* Other processes used more than {BUSY_CORES} cores while this row was measured.")
    return block


def shape_cells(case: Case) -> list[str]:
    heads = str(case.H) if case.H == case.HV else f"{case.H} / {case.HV}"
    return [str(case.B), str(case.T), heads, str(case.D), case.dtype]


def time_cell(record: dict | None, ours: dict | None = None) -> str:
    if record is None:
        return ""
    if record["status"] != OK:
        return record["status"]
    text = duration(record["median_s"])
    if ours is not None and ours["status"] == OK:
        ratio = record["median_s"] / ours["median_s"]
        text += f" ({ratio:.1f}x)" if ratio >= 0.95 else f" ({ratio:.2f}x)"
    return text


def duration(seconds: float) -> str:
    """Three significant digits in the unit that suits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def memory_section(records: list[dict]) -> list[str]:
    measured = [record for record in records if record["status"] == OK]
    if not measured:
        return []
    present = {record["implementation"] for record in records}
    columns = [one for one in IMPLEMENTATIONS if one.name in present]
    lines = []
    for case in dict.fromkeys(case_of(record) for record in records):
        here = {record["implementation"]: record for record in records if case_of(record) == case}
        cells = [TITLES[case.op], case.mode, str(case.T)]
        for one in columns:
            record = here.get(one.name)
            if record is None:
                cells.append("")
            else:
                ok = record["status"] == OK
                cells.append(f"{record['extra_bytes'] / 1e6:,.0f} MB" if ok else record["status"])
        lines.append(cells)
    threads = measured[0]["threads"]
    return [
        "## Memory",
        "Peak resident memory of one call beyond its inputs and results, each point in a fresh process. "
        f"B 1, 16 heads of 128, fp32, threads {threads}.",
        table(["op", "mode", "T", *(one.label for one in columns)], lines),
    ]


def gate_section(records: list[dict]) -> list[str]:
    """The worst error of each implementation in the gate, by op, mode and dtype."""
    worst: dict[tuple, dict[str, float]] = {}
    for record in records:
        if record["status"] == OK and record.get("nmse") is not None:
            errors = worst.setdefault((record["op"], record["mode"], record["dtype"]), {})
            name = record["implementation"]
            errors[name] = max(errors.get(name, 0.0), record["nmse"])
    if not worst:
        return []
    columns = [one for one in IMPLEMENTATIONS if any(one.name in errors for errors in worst.values())]
    lines = [
        [*key, *(f"{errors[one.name]:.1e}" if one.name in errors else "" for one in columns)]
        for key, errors in worst.items()
    ]
    return [
        "## Agreement with the fp64 recurrence",
        "Normalised mean squared error on a small case of the same kind: the worst of output, state and gradients.",
        table(["op", "mode", "dtype", *(one.label for one in columns)], lines),
    ]


def absent_section(records: list[dict]) -> list[str]:
    lines = []
    for record in records:
        if record["status"] != OK:
            label = BY_NAME[record["implementation"]].label
            reason = record["reason"].replace("|", "/")
            lines.append([case_of(record).key, str(record["threads"]), label, record["status"], reason])
    if not lines:
        return []
    return ["## Not measured", table(["case", "threads", "implementation", "status", "reason"], lines)]


def table(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])
