"""docs/chips.md, from the table of chips."""

from dataclasses import fields
from typing import Any

from fla_npu.planner.chips import CHIPS, KIB, Bandwidths


def _way(name: str) -> str:
    ends = name.split("_to_")
    if len(ends) > 1:
        return " to ".join(end.upper() for end in ends)
    memory, _, what = name.partition("_")
    return f"{memory.upper()} {what}"


_TABLES: tuple[tuple[str, tuple[tuple[str, str, float | None], ...]], ...] = (
    (
        "Cores, buffers (KiB) and types",
        (
            ("cores", "aicores", 1),
            ("vector cores", "vector_cores", 1),
            ("UB", "ub_bytes", KIB),
            ("L1", "l1_bytes", KIB),
            ("L0A", "l0a_bytes", KIB),
            ("L0B", "l0b_bytes", KIB),
            ("L0C", "l0c_bytes", KIB),
            ("vector to matrix", "vector_to_cube", None),
            ("matrix types", "matrix_dtypes", None),
            ("vector types", "vector_dtypes", None),
        ),
    ),
    (
        "Arithmetic of one core: clock (MHz), products and bytes per cycle; power of a board (W per chip)",
        (
            ("clock", "rates.hertz", 1e6),
            ("16-bit products", "rates.macs_per_cycle", 1),
            ("32-bit products", "rates.fp32_macs_per_cycle", 1),
            ("vector bytes", "rates.vector_bytes_per_cycle", 1),
            ("power", "board_watts", 1),
        ),
    ),
    (
        "Ways between memories (GB/s of one core; GM total of the chip)",
        tuple((_way(way.name), f"bandwidths.{way.name}", 1e9) for way in fields(Bandwidths)),
    ),
)


def _cell(value: Any, unit: float | None) -> str:
    if value is None:
        return "-"
    if unit is not None:
        return f"{value / unit:.4g}"
    return value.replace("_", " ") if isinstance(value, str) else ", ".join(value)


def table() -> str:
    """docs/chips.md: the figures of every chip and their sources, in Markdown."""
    lines = [
        "# Chips",
        "",
        "What the planner, the dispatch and the compile checks know of each chip; `-` is unknown, or no such way. Ways",
        "with `CANN` as their source are peaks, those of the paper measured. The figures are in",
        "`fla_npu/planner/chips.py`, this page is made by `planner.chip_table.table`.",
    ]
    by_source: dict[tuple[str, str], list[str]] = {}
    for title, columns in _TABLES:
        lines += ["", f"## {title}", "", "| chip | " + " | ".join(label for label, _, _ in columns) + " |"]
        lines.append("|---" * (1 + len(columns)) + "|")
        for one in CHIPS.values():
            figures = one.figures()
            lines.append(
                f"| {one.name} | " + " | ".join(_cell(figures.get(name), unit) for _, name, unit in columns) + " |"
            )
            for label, name, _ in columns:
                if name in figures:
                    by_source.setdefault((label, one.source(name)), []).append(one.name)
    rows: dict[tuple[str, str], list[str]] = {}
    for (label, source), names in by_source.items():
        rows.setdefault((source, ", ".join(names)), []).append(label)
    lines += ["", "## Sources", "", "| figure | chips | source |", "|---|---|---|"]
    lines += [f"| {', '.join(labels)} | {names} | {source} |" for (source, names), labels in rows.items()]
    return "\n".join(lines) + "\n"
