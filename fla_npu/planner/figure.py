"""A plan as a picture: memories by step, cores over time, traffic and time of the alternatives. Needs matplotlib."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fla_npu.errors import MissingExtraError
from fla_npu.planner.chips import KIB
from fla_npu.planner.chips import chip as find_chip
from fla_npu.planner.dataflow import placed, semantic
from fla_npu.planner.layout import naive_layouts, occupied
from fla_npu.planner.order import occupancy, rereading, semantic_order
from fla_npu.planner.plan import Plan
from fla_npu.planner.report import sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, OURS_IN_PART, THEIRS, DEFAULT, LIMIT = "#0b6e99", "#7fb3cc", "#8a959d", "#d9822b", "#b3202c"
MIB = KIB * KIB


def draw(plan: Plan, path: Path) -> None:
    """Draw a plan into a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: see `checked`.
        OSError: the file cannot be written.
    """
    figure(plan).savefig(checked(path), format="png")


def checked(path: Path) -> Path:
    """The path, if a picture can have it.

    Raises:
        ValueError: it does not end in .png, is a folder, or is in none.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"plot must be a path that ends in .png, got {str(path)!r}")
    if path.is_dir():
        raise ValueError(f"plot must be a file, got the folder {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"plot must be in a folder that exists, got {str(path)!r}")
    return path


def figure(plan: Plan) -> "Figure":
    """The picture of a plan.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    made = Figure(figsize=(12, 9), dpi=110, layout="constrained")
    made.suptitle(sizes(plan))
    rows: Any = made.subfigures(3, 1, height_ratios=(1.0, 0.9, 0.8))
    memories, cores, costs = rows
    _memories(plan, memories.subplots(1, len(plan.memories)))
    _cores(plan, cores.subplots())
    _costs(plan, costs.subplots(1, 2, sharey=True))
    return made


def _memories(plan: Plan, axes: Any) -> None:
    chip = find_chip(plan.request.chip)
    graph = rereading(placed(semantic(plan.request.op, plan.shape), chip))
    order = semantic_order(graph)
    default = dict(occupancy(graph, order, plan.buffers))
    default["UB"] = occupied(graph, order, naive_layouts(graph, chip), plan.buffers)
    for at, (memory, axis) in enumerate(zip(plan.memories, axes, strict=True)):
        planned = [step.live[at] for step in plan.steps]
        curves = (
            (default[memory.name], DEFAULT, "default order and layouts, as defined"),  # type: ignore[index]
            (planned, OURS, "planned, rewritten"),
        )
        for live, colour, label in curves:
            kib = [size / KIB for size in live]
            axis.stairs(kib, color=colour, linewidth=1.8, label=label, baseline=None)
        top = max(max(default[memory.name]), memory.peak, memory.bytes or 0) / KIB  # type: ignore[index]
        if memory.bytes is not None:
            axis.axhline(memory.bytes / KIB, color=LIMIT, linestyle="--", linewidth=1.2, label="size of the memory")
        axis.set(title=memory.name, xlabel="step", ylim=(0, 1.08 * top))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("KiB alive")
    axes[0].legend(fontsize=8, loc="lower center", frameon=True)


def _cores(plan: Plan, axis: Any) -> None:
    unit = dict(plan.predictions[-1].stages)["head"] * 1e3 / plan.dealt.makespan
    drawn = set()
    for core, spans in enumerate(plan.timeline()):
        for whole, some in groupby(spans, key=lambda one: one.whole):
            bars = list(some)
            # Bars of less than a pixel are drawn as one.
            fine = len(bars) > 400
            places = (
                [(bars[0].start * unit, (bars[-1].end - bars[0].start) * unit)]
                if fine
                else [(one.start * unit, (one.end - one.start) * unit) for one in bars]
            )
            label = "whole heads" if whole else f"tiles of {plan.dealt.tile} columns"
            axis.broken_barh(
                places,
                (core - 0.4, 0.8),
                facecolor=OURS if whole else DEFAULT,
                edgecolor="none" if fine else "white",
                linewidth=0.6,
                label=None if label in drawn else label,
            )
            drawn.add(label)
    even = plan.dealt.bound * unit
    axis.axvline(even, color=LIMIT, linestyle="--", linewidth=1.2, label="even share")
    title = (
        "heads to cores" if plan.dealt.segments is None else "segments of heads to cores, the last of three launches"
    )
    axis.set(xlabel="ms, predicted", ylabel="core", title=title, xlim=(0, 1.01 * unit * plan.dealt.makespan))
    axis.set_ylim(plan.dealt.cores - 0.4, -0.6)
    axis.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)


def _costs(plan: Plan, axes: Any) -> None:
    names = [one.name for one in plan.predictions]
    colours = [OURS_IN_PART if one.mapping == "head" else THEIRS for one in plan.predictions[:-1]] + [OURS]
    traffic = [(one.gm_read + one.gm_written) / MIB for one in plan.predictions]
    times = [one.seconds * 1e3 for one in plan.predictions]
    for axis, values, title in ((axes[0], traffic, "global memory, MiB"), (axes[1], times, "predicted time, ms")):
        # One bar that is much longer than all others would make them look alike: it is cut off.
        *_, second, longest = sorted(values)
        end = 1.2 * (second if longest > 2 * second else longest)
        bars = axis.barh(names, values, color=colours)
        for bar, value in zip(bars, values, strict=True):
            cut = value > end
            text = f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
            axis.annotate(
                f"{text} \u2192" if cut else text,
                (min(value, end), bar.get_y() + bar.get_height() / 2),
                xytext=(-4 if cut else 4, 0),
                textcoords="offset points",
                ha="right" if cut else "left",
                va="center",
                fontsize=9,
                color="white" if cut else "black",
            )
        axis.set(title=title, xlim=(0, end))
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].invert_yaxis()
