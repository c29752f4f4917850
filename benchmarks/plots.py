"""The plots of a run, drawn from the JSON rows. matplotlib is imported when drawing, so that the summary needs none."""

from __future__ import annotations

from pathlib import Path

from benchmarks.registry import IMPLEMENTATIONS, OPS, OURS, Case, Implementation
from benchmarks.report import TITLES, duration
from benchmarks.rows import OK, case_of

COLOURS = {
    OURS: "#c8102e",
    "hf_chunk": "#1f77b4",
    "hf_recurrent": "#8ab8dd",
    "fla_naive_chunk": "#2a8a2a",
    "fla_naive_recurrent": "#93cc93",
    "ggml": "#e08a00",
    "gemm": "#777777",
}


def draw_all(out: Path, timings: list[dict], memory: list[dict]) -> list[Path]:
    """Draw what the rows allow and return the files."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = [
        series(out / "forward.png", timings, "forward", "median_s", 1.0, "time per call, s"),
        series(out / "forward_backward.png", timings, "forward+backward", "median_s", 1.0, "time per call, s"),
        series(
            out / "memory.png", memory, "forward", "extra_bytes", 1e6, "peak beyond inputs and results, MB", floor=1.0
        ),
        bars(out / "target.png", timings, "forward", "T 4096, B 1, 16 heads of 128, fp32, forward"),
        bars(out / "decode.png", timings, "decode", "one token, B 1, 16 heads of 128, fp32"),
    ]
    return [path for path in drawn if path is not None]


def ok_rows(records: list[dict], mode: str) -> list[dict]:
    return [record for record in records if record["status"] == OK and record["mode"] == mode]


def series(
    path: Path, records: list[dict], mode: str, field: str, unit: float, label: str, floor: float = 0.0
) -> Path | None:
    """A value along T at the centre of the star: one panel per op and number of threads. What lies below `floor` is
    drawn on it: next to nothing has no place on a log scale."""
    from matplotlib import pyplot

    records = [
        record for record in ok_rows(records, mode) if case_of(record) == Case(record["op"], mode, T=record["T"])
    ]
    if not records:
        return None
    threads = sorted({record["threads"] for record in records})
    figure, axes = pyplot.subplots(
        len(threads), len(OPS), figsize=(11, 1.2 + 4.0 * len(threads)), squeeze=False, sharex=True, sharey=True
    )
    handles = {}
    for row, count in zip(axes, threads, strict=True):
        for axis, op in zip(row, OPS, strict=True):
            for one in IMPLEMENTATIONS:
                points = sorted(
                    (record["T"], max(record[field] / unit, floor))
                    for record in records
                    if (record["op"], record["threads"], record["implementation"]) == (op, count, one.name)
                )
                if points:
                    handles[one.label] = draw_line(axis, one, points)
            axis.set(xscale="log", yscale="log", title=f"{TITLES[op]}, {threads_text(count)}")
            axis.set_xscale("log", base=2)
            lengths = sorted({record["T"] for record in records})
            axis.set_xticks(lengths, [str(length) for length in lengths])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        row[0].set_ylabel(label if floor == 0 else f"{label} (at least {floor:g})")
    for axis in axes[-1]:
        axis.set_xlabel("T, tokens")
    figure.suptitle(f"{mode}: B 1, 16 heads of 128, fp32")
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.09 if len(threads) == 1 else 0.06, 1, 1))
    return save(figure, path)


def draw_line(axis, one: Implementation, points: list[tuple[float, float]]):
    marker = "D" if one.name == OURS else "s" if one.name.endswith("recurrent") else "o"
    (line,) = axis.plot(
        *zip(*points, strict=True),
        color=COLOURS[one.name],
        marker=marker,
        markersize=5,
        linewidth=2.6 if one.name == OURS else 1.5,
        linestyle="--" if not one.checked else "-",
        zorder=3 if one.name == OURS else 2,
    )
    return line


def bars(path: Path, records: list[dict], mode: str, title: str) -> Path | None:
    """Time of every implementation at the centre of the star: for `decode` in microseconds, otherwise over ours."""
    from matplotlib import pyplot

    relative = mode != "decode"
    length = Case.T if relative else 1
    records = [record for record in ok_rows(records, mode) if case_of(record) == Case(record["op"], mode, T=length)]
    ours = {(record["op"], record["threads"]): record for record in records if record["implementation"] == OURS}
    records = [record for record in records if (record["op"], record["threads"]) in ours]
    if not records:
        return None
    threads = sorted({record["threads"] for record in records})
    figure, axes = pyplot.subplots(
        len(threads), len(OPS), figsize=(12, 1.0 + 2.6 * len(threads)), squeeze=False, sharex=True
    )
    largest = 0.0
    for row, count in zip(axes, threads, strict=True):
        for axis, op in zip(row, OPS, strict=True):
            here = {
                record["implementation"]: record
                for record in records
                if (record["op"], record["threads"]) == (op, count)
            }
            shown = [one for one in IMPLEMENTATIONS if one.name in here][::-1]
            ratios = [here[one.name]["median_s"] / ours[op, count]["median_s"] for one in shown]
            times = [here[one.name]["median_s"] for one in shown]
            values = ratios if relative else [time * 1e6 for time in times]
            largest = max(largest, *values)
            drawn = axis.barh([one.label for one in shown], values, color=[COLOURS[one.name] for one in shown])
            texts = [f"{ratio:.3g}x   {duration(time)}" for ratio, time in zip(ratios, times, strict=True)]
            axis.bar_label(drawn, texts, padding=4, fontsize=9)
            axis.set(title=f"{TITLES[op]}, {threads_text(count)}", xscale="log" if relative else "linear")
            axis.grid(axis="x", alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    # Room on the right for the text of the longest bar.
    axes[0][0].set_xlim((0.1, largest * 12) if relative else (0, largest * 1.4))
    for axis in axes[-1]:
        axis.set_xlabel("time per call over fla_npu's, log scale" if relative else "time per call, us")
    figure.suptitle(title)
    figure.tight_layout()
    return save(figure, path)


def threads_text(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def save(figure, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
