"""A plan as text for people, 100 columns wide."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap

from fla_npu.planner.chips import KIB
from fla_npu.planner.plan import Plan, Prediction, Span

WIDTH = 100
BAR = 60
"""Characters of a core's time line."""

MIB = KIB * KIB


def text(plan: Plan, *, compare: bool = False) -> str:
    """The report of a plan.

    Args:
        compare: with the costs of the alternatives beside those of the plan.
    """
    parts = [_head(plan), _order(plan), _layouts(plan), _cores(plan), _costs(plan, compare)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def sizes(plan: Plan) -> str:
    """What was planned, in one line."""
    request, lengths = plan.request, plan.request.lengths
    if len(set(lengths)) == 1:
        number = f"{len(lengths)} sequences" if len(lengths) > 1 else "1 sequence"
        tokens = f"{number} of {lengths[0]:,} tokens"
    else:
        tokens = f"{len(lengths):,} sequences of {min(lengths):,} to {max(lengths):,} tokens, {sum(lengths):,} in all"
    heads = f"{request.heads} head{'s' if request.heads != 1 else ''} of {request.K} x {request.V}"
    return f"{request.op} on {request.chip}: {tokens}, {heads}, {request.dtype}"


def _head(plan: Plan) -> Iterator[str]:
    yield sizes(plan)
    buffers = "two places" if plan.buffers > 1 else "one place"
    yield (
        f"chunks of {plan.config.chunk} tokens, {plan.shape.V} columns of a state at once, "
        f"{buffers} for each input and output"
    )
    for one in plan.memories:
        share = "size unknown" if one.bytes is None else f"of {one.bytes / KIB:>6,.0f} KiB {one.peak / one.bytes:>6.0%}"
        yield f"  {one.name:<5}{one.peak / KIB:>8,.1f} {share}"
    if plan.spilled:
        yield from _wrapped("  spilled to global memory: ", plan.spilled)


def _order(plan: Plan) -> Iterator[str]:
    yield "order of operators, and KiB alive in each memory meanwhile"
    names = [one.name for one in plan.memories]
    width = max(len(step.operator) for step in plan.steps)
    figures = "".join(f"{name:>7}" for name in names)
    yield f"  {'#':>3}  {'operator':<{width}}  {'phase':<6}{'unit':<7}{figures}   computes"
    for number, step in enumerate(plan.steps, 1):
        live = "".join(f"{size / KIB:>7.1f}" for size in step.live)
        line = f"  {number:>3}  {step.operator:<{width}}  {step.phase:<6}{step.unit:<7}{live}   "
        computes = step.computes
        yield line + (computes if len(line) + len(computes) <= WIDTH else f"{computes[: WIDTH - len(line) - 3]}...")


def _layouts(plan: Plan) -> Iterator[str]:
    yield f"layouts (the state: {plan.state})"
    for memory in dict.fromkeys(one.memory for one in plan.tensors):
        for layout in ("dense", "blocked"):
            names = [one.name for one in plan.tensors if (one.memory, one.layout) == (memory, layout)]
            if names:
                yield from _wrapped(f"  {memory:<4} {layout:<8}", names)
    yield f"transforms in every chunk: {len(plan.sites) or 'none'}"
    for site in plan.sites:
        way = "a pass of the vector unit" if site.path == "UB" else f"on the way {site.path}"
        yield f"  {site.tensor} to {site.target}, {way}, for {site.operator}"


def _wrapped(head: str, names: Sequence[str]) -> list[str]:
    indent = " " * len(head)
    return wrap(", ".join(names), WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def _cores(plan: Plan) -> Iterator[str]:
    dealt = plan.dealt
    tiles = (dealt.units - dealt.whole) * dealt.parts
    what = "heads" if plan.shape.V >= plan.request.V else "column blocks"
    shares = f"{dealt.whole} {what} whole" + (f", {tiles} tiles of {dealt.tile} columns" if tiles else "")
    yield f"cores: {shares}; the busiest has {dealt.makespan / dealt.bound:.2f} times its even share"
    if dealt.segments is not None:
        yield f"  a launch over {sum(map(len, dealt.segments))} segments; there are three like it"
    if dealt.tail:
        yield f"  {dealt.tail} heads would end earlier chunk by chunk on all cores: not done, not in the predictions"
    yield f"  {'core':<8}# whole head, = tile, . idle"
    lines = [(_bar(spans, dealt.makespan), spans) for spans in plan.timeline()]
    numbered = [(number, bar, len(spans)) for number, (bar, spans) in enumerate(lines)]
    for (bar, items), some in groupby(numbered, key=lambda one: one[1:]):
        cores = [one[0] for one in some]
        name = str(cores[0]) if len(cores) == 1 else f"{cores[0]}-{cores[-1]}"
        yield f"  {name:<8}{bar} {items:,} item{'s' if items != 1 else ''}"


def _bar(spans: Sequence[Span], makespan: int) -> str:
    """One character for each equal part of the time: what runs in its middle."""
    cells, at = [], 0
    for cell in range(BAR):
        middle = (2 * cell + 1) * makespan
        while at < len(spans) and spans[at].end * 2 * BAR <= middle:
            at += 1
        if at == len(spans):
            cells.append(".")
        else:
            starts = spans[at].start * 2 * BAR > middle - 2 * makespan and spans[at].start > 0
            cells.append("|" if starts else "#" if spans[at].whole else "=")
    return "".join(cells)


def _costs(plan: Plan, compare: bool) -> Iterator[str]:
    rows = plan.predictions if compare else plan.predictions[-1:]
    ours = plan.predictions[-1]
    columns: list[tuple[str, Callable[[Prediction], str]]] = [
        ("launches", lambda one: f"{one.launches:,}"),
        ("GM MiB", lambda one: f"{(one.gm_read + one.gm_written) / MIB:,.1f}"),
        ("L0 MiB", lambda one: f"{dict(one.paths).get('L1->L0', 0) / MIB:,.1f}"),
        ("GMAC", lambda one: f"{one.macs / 1e9:,.2f}"),
        ("Gvector", lambda one: f"{one.element_ops / 1e9:,.2f}"),
        ("held MiB", lambda one: f"{one.peak_bytes / MIB:,.1f}"),
        ("ms", lambda one: f"{one.seconds * 1e3:,.2f}"),
    ]
    if ours.joules is not None:
        columns.append(("J", lambda one: f"{one.joules:,.3f}"))
    if compare:
        columns.append(("x ours", lambda one: f"{one.seconds / ours.seconds:,.2f}"))
    yield "predicted costs; L0: moved from L1 to L0, held: at most in device memory, vector: element operations"
    table = [["", *(name for name, _ in columns)]]
    table += [[one.name, *(figure(one) for _, figure in columns)] for one in rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for first, *rest in table:
        yield f"  {first:<{widths[0]}}" + "".join(
            f"{cell:>{size + 2}}" for cell, size in zip(rest, widths[1:], strict=True)
        )
