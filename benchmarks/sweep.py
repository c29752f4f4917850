"""`python -m benchmarks.sweep`: every chunk and tile size of the chunk kernel, measured on an NPU or, without one,
compiled and ranked by what the compiler's program moves and computes.

    python -m benchmarks.sweep                        compile the grid (or measure it, where there is an NPU), plot it
    python -m benchmarks.sweep --trial                run what would ship in the simulator
    python -m benchmarks.sweep --defaults             write fla_npu/ops/common/defaults.json from the rows
    python -m benchmarks.sweep --plot                 draw again

Rows are saved as they come; those of the same kernel source are not made again. `docs/tuning.md` has the figures."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import combinations, product
from pathlib import Path

import click

from fla_npu.ops.common import tune
from fla_npu.ops.common.configs import Config
from fla_npu.planner.chips import chip as find_chip
from fla_npu.planner.cost import schedule_cost
from fla_npu.planner.schedule import equal_schedule

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "sweep"
DEFAULTS = HERE.parent / "fla_npu" / "ops" / "common" / "defaults.json"
TITLES = {"chunk_gdn": "Gated DeltaNet", "chunk_kda": "Kimi Delta Attention"}
SIZES = (128, 64, 256)
SEQ = 4096
"""Tokens of the launch that the figures of a row are those of; one head per core."""


@dataclass(frozen=True)
class Case:
    """One configuration of one kernel for one chip."""

    op: str
    chip: str
    precision: str
    dtype: str
    K: int
    V: int
    config: Config
    bounded: bool = True
    """KDA: the log decays have a bound (-5)."""

    @property
    def fast(self) -> bool:
        return self.precision == "fast"

    def record(self) -> dict:
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping) -> Case:
        names = [field.name for field in fields(cls)]
        return cls(**{**{name: row[name] for name in names}, "config": Config(**row["config"])})


# The ranking

WEIGHTS = {"sync": 900.0, "workspace": 1 / 64, "user": 1 / 32, "macs16": 1 / 4096, "macs32": 1 / 1024, "vector": 1 / 64}
"""Cycles (at 1.8 GHz) that a figure costs a core.

* A hand-off between cores: 0.5 us, an assumption.
* A byte of global memory: 32 per cycle and core (CANN's platform file); of the workspace twice as fast, as it lies
  in the L2 cache, an assumption.
* A product: 16^3 per cycle in 16 bits (CANN), a quarter of that in float32, an assumption.
* A vector element: 32 per cycle and vector core (CANN), two of them.

All added up: the chunk loop carries the state, so cube and vector cores wait for each other.
"""


def cycles(row: Mapping, weights: Mapping[str, float] = WEIGHTS) -> float:
    """Estimated cycles per token and head of a compiled row; infinite where it must not ship.

    On the A5 the split over the vector cores is lost whatever the sizes, so there it is no reason.
    """
    faults = [problem for problem in row["problems"] if "split" not in problem or "950" not in row["chip"]]
    if row["per_token"] is None or faults:
        return math.inf
    return sum(weight * row["per_token"][name] for name, weight in weights.items())


def stable(rows: Iterable[Mapping], factor: float = 2.0) -> bool:
    """Whether the first of the rows stays first with each weight multiplied or divided by a factor."""
    rows = list(rows)
    first = min(rows, key=cycles)
    changed = [{**WEIGHTS, name: WEIGHTS[name] * by} for name in WEIGHTS for by in (factor, 1 / factor)]
    return all(min(rows, key=lambda row, w=weights: cycles(row, w)) is first for weights in changed)


# The grid


def grid(chips: Iterable[str], full: bool = False) -> list[Case]:
    """What is compiled for a chip: sizes in both precisions, bf16, with the default options.

    With `full` also what changes little: all sizes with K = 256, float32 and fp16 inputs, tiles, compiler options.
    """
    cases = []
    for name in chips:
        if find_chip(name).family == "A5":
            # The split is lost there with this front end, so the table only tells what compiles at all.
            for K, op, precision, chunk in product(SIZES[:2], tune.OPS, ("exact", "fast"), tune.CHUNKS[::-1]):
                cases.append(Case(op, name, precision, "bf16", K, K, Config(chunk=chunk, width=K)))
            continue
        for K, op, precision, chunk, width in product(
            SIZES, tune.OPS, ("exact", "fast"), tune.CHUNKS[::-1], tune.WIDTHS[::-1]
        ):
            # With K = 256 few fit; for KDA the compiler takes minutes to find that chunks of 64 do not.
            few = chunk == 32 or (chunk == 64 and width > 32 and op == "chunk_gdn")
            if K < 256 or full or few:
                cases.append(Case(op, name, precision, "bf16", K, max(K, width), Config(chunk=chunk, width=width)))
        cases.append(Case("chunk_kda", name, "exact", "bf16", 128, 128, Config(), bounded=False))
        for op in tune.OPS if full else ():
            for chunk, width in ((64, 128), (64, 64), (64, 32), (32, 128), (16, 128)):
                cases.append(Case(op, name, "fp32", "fp32", 128, 128, Config(chunk=chunk, width=width)))
            for precision in ("exact", "fast"):
                cases.append(Case(op, name, precision, "fp16", 128, 128, Config()))
                cases.append(Case(op, name, precision, "bf16", 128, 128, Config(tile=32)))
            cases += [Case(op, name, "exact", "bf16", 128, 128, variant) for variant in tune.variants(Config())]
    return cases


# Rows on disk


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"run": {}, "rows": []}


def write(path: Path, data: object) -> None:
    """The whole file or nothing of it; one row a line, so that changes can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1)
    if isinstance(data, dict) and "rows" in data:
        head = json.dumps({name: value for name, value in data.items() if name != "rows"}, indent=1)
        body = ",\n".join(json.dumps(row) for row in data["rows"])
        text = f'{head[:-2]},\n "rows": [\n{body}\n]}}\n'
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


class Table:
    """Rows of a file by their case, saved after each."""

    def __init__(self, path: Path, run: dict):
        self.path, self.run = path, run
        # Where a source changed while the sweep ran, its rows say so: each carries the hash it was made from.
        self.rows = {Case.of(row): row for row in read(path)["rows"]}

    def fresh(self, case: Case) -> bool:
        return case in self.rows and self.rows[case]["source"] == tune.source_hash()

    def add(self, case: Case, figures: dict) -> None:
        self.rows[case] = {**case.record(), "source": tune.source_hash(), **figures}
        self.save()

    def save(self) -> None:
        write(self.path, {"run": self.run, "rows": list(self.rows.values())})


def describe() -> dict:
    """When and of which commit. Not `benchmarks.run.describe_run`: where compilers are, its packages need not be."""
    git = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": git.stdout.strip() or "unknown",
        "seq": SEQ,
        "weights": WEIGHTS,
    }


# Compiling


def figures(compiled, case: Case, scalars: dict, arrays: dict, cores: int) -> dict:
    """A row's figures: the report's, and those of a launch of one head per core, per token and head."""
    from fla_npu.compiler.evaluate import Program, launch

    report = compiled.report
    row = {
        "kind": "compiled",
        "compiler": report.compiler,
        "verdict": report.verdict,
        "ok": report.ok,
        "problems": list(report.problems),
        "needs": {memory: bits // 8 for memory, bits, _ in report.needs},
        "peak": dict(report.peak),
        "limit": dict(report.limit),
        "split": report.split,
        "workspace": report.workspace,
        "syncs": report.chunk_syncs,
        "program": None,
        "per_token": None,
    }
    if report.verdict != "passed" or report.unread:
        return row
    row["program"] = hashlib.sha256(compiled.outcome.module.encode()).hexdigest()[:16]
    if report.chunk is None:
        return row
    totals = Program(compiled.module, compiled.arguments).launch_totals(launch(cores, scalars, arrays))
    macs = totals.by("macs")
    counted = {
        "sync": totals.syncs,
        "workspace": totals.workspace,
        "user": totals.user_read + totals.user_written,
        "macs16": sum(value for dtype, value in macs.items() if dtype != "f32"),
        "macs32": macs.get("f32", 0),
        "vector": totals.vector_elements,
    }
    row["per_token"] = {name: round(value / (cores * SEQ), 4) for name, value in counted.items()}
    row["cycles"] = None if math.isinf(cycles(row)) else round(cycles(row), 2)
    return row


def compile_grid(cases: list[Case], table: Table, jobs: int) -> None:
    from fla_npu.compiler.api import compile_many
    from fla_npu.ops.common.builds import build_for

    by_chip: dict[str, dict] = {}
    for case in cases:
        if table.fresh(case):
            continue
        cores = find_chip(case.chip).aicores
        # A tile is used where there is a residue for it.
        heads = cores + cores // 4 if case.config.tile else cores
        build, scalars, arrays, _ = build_for(
            case.op, case.chip, dtype=case.dtype, K=case.K, V=case.V, heads=heads, seq=SEQ,
            precision="fast" if case.fast else "exact", config=case.config,
            lower_bound=-5.0 if case.bounded else None,
        )  # fmt: skip
        by_chip.setdefault(case.chip, {})[build] = (case, scalars, arrays, cores)
    total = sum(len(builds) for builds in by_chip.values())
    with click.progressbar(length=total, label="compiling", show_pos=True, file=sys.stderr) as progress:
        for name, builds in by_chip.items():

            def done(result, builds=builds) -> None:
                case, scalars, arrays, cores = builds[result.build]
                table.add(case, figures(result, case, scalars, arrays, cores))
                progress.update(1)

            compile_many(list(builds), (name,), jobs=jobs, progress=done)


# Measuring


def measure_grid(cases: list[Case], table: Table, cores: int, rounds: int) -> None:
    from fla_npu.ops.common import device_timer

    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        if not table.fresh(case):
            groups.setdefault(
                (case.op, case.chip, case.precision, case.dtype, case.K, case.V, case.bounded), []
            ).append(case)
    for number, group in enumerate(groups.values(), 1):
        one = group[0]
        click.echo(f"{number}/{len(groups)} {one.op} {one.precision} {one.dtype} K{one.K} V{one.V}", err=True)
        measure = device_timer.timer(
            one.op, K=one.K, V=one.V, dtype=one.dtype, fast=one.fast, heads=cores, tokens=SEQ, cores=cores,
            lower_bound=-5.0 if one.bounded else None,
        )  # fmt: skip
        medians = tune.race([case.config for case in group], measure, rounds)
        for case in group:
            seconds = medians[case.config]
            good = seconds < math.inf
            table.add(
                case,
                {
                    "kind": "measured",
                    "ok": good,
                    "problems": [] if good else ["failed, or computed something else"],
                    "seconds": seconds if good else None,
                    "nanoseconds": round(seconds / SEQ * 1e9, 3) if good else None,
                },
            )


# What ships


def predict(
    rows: Mapping[tuple[int, int], Mapping], op: str, config: Config, units: int, V: int, length: int, cores: int
) -> float:
    """Cycles of a call: rounds of whole units and of tiles as the schedule deals them, each as its row counts.

    Args:
        rows: compiled rows of one op, precision and K by (chunk, width), V = K columns.
        op: `chunk_gdn` or `chunk_kda`.
        config: chunk, width and tile.
        units: sequences times heads, with V columns each.
    """
    cost = schedule_cost(op.removeprefix("chunk_"))
    plan = equal_schedule(
        1, units, cores, value_dim=V, tiles=config.tiles, length=length, chunk=config.chunk, cost=cost
    )
    split, tokens = plan.split, -(-length // config.chunk) * config.chunk

    def one(width: int) -> float:
        row = rows.get((config.chunk, width))
        return math.inf if row is None else cycles(row) / -(-row["V"] // width)

    whole = -(-split.whole // cores) * one(split.width) if split.whole else 0.0
    tiles = -(-(split.units - split.whole) * split.parts // cores) if split.units > split.whole else 0
    return tokens * (whole + (tiles * one(split.tile) if tiles else 0.0))


def representative(load: str, cores: int) -> int:
    """Units (of up to 128 columns) that stand for a class of load; between two rounds, where tiles matter."""
    return {
        "quarter": cores // 4,
        "half": cores // 2,
        "one": cores * 3 // 4,
        "some": cores * 9 // 4,
        "many": cores * 8,
    }[load]


GAIN = 0.85
"""What narrower columns or tiles must save to ship: the weights are not known well enough for less."""


def choose(rows: Mapping[tuple[int, int], Mapping], key: tune.Key, cores: int, usable) -> Config | None:
    """The configuration of least predicted cycles for a key, among those that `usable` accepts; None without any.

    All columns at once, unless fewer save what `GAIN` says; sequences of a chunk or less are over before it matters.
    """
    tokens = {"16": 16, "32": 32, "long": SEQ}[key.length]
    units = representative(key.load, cores)
    scored = {
        config: predict(rows, key.op, config, units, key.V, tokens, cores)
        for config in tune.sizes(key)
        if usable(key, config)
    }
    scored = {config: value for config, value in scored.items() if value < math.inf}
    if not scored:
        return None
    widest = max(config.width for config in scored)
    plain = min(
        (c for c in scored if c.width == widest and not c.tile), key=lambda config: scored[config], default=None
    )
    best = min(scored, key=lambda config: scored[config])
    if plain is None or (key.length == "long" and scored[best] < GAIN * scored[plain]):
        return best
    return plain


def sized(table: Iterable[Mapping], chip: str, op: str, precision: str, K: int) -> dict[tuple[int, int], Mapping]:
    """Compiled rows of plain sizes by (chunk, width); bf16 stands for both 16-bit types."""
    dtype = "fp32" if precision == "fp32" else "bf16"
    return {
        (row["config"]["chunk"], row["config"]["width"]): row
        for row in table
        if (row["chip"], row["op"], row["precision"], row["dtype"], row["K"]) == (chip, op, precision, dtype, K)
        and row["bounded"]
        and Config(**row["config"]) == Config(chunk=row["config"]["chunk"], width=row["config"]["width"])
    }


CHIP_OF = {"A2": "910B3", "A5": "950"}


def ship(table: list[Mapping], trials: list[Mapping]) -> dict:
    """The shipped table, from compiled rows and trials. Where K has no float32 rows, those of `exact` stand in."""
    usable = usable_by(trials)
    rows = []
    for family, chip in CHIP_OF.items():
        if not any(row["chip"] == chip for row in table):
            continue
        cores = find_chip(chip).aicores
        for op, precision, K, V in product(tune.OPS, tune.PRECISIONS, sorted(SIZES), tune.WIDTHS):
            compiled = sized(table, chip, op, precision, K) or sized(table, chip, op, "exact", K)
            chosen = {}
            for load, length in product(tune.LOADS, tune.LENGTHS):
                key = tune.Key(op, chip, K, V, precision, load, length)
                # Where nothing compiles without a fault: small sizes without multi-buffering, which may still run.
                least = Config(chunk=32, width=32, multibuffer=False)
                chosen[f"{load} {length}"] = _short(choose(compiled, key, cores, usable) or least)
            default = chosen["many long"]
            rows.append(
                {
                    "family": family,
                    "op": op,
                    "precision": precision,
                    "K": K,
                    "V": V,
                    "config": default,
                    "other": {cell: config for cell, config in chosen.items() if config != default},
                }
            )
    return {"source": sorted({row["source"] for row in table}), "buffers": buffer_model(table), "rows": rows}


def _short(config: Config) -> dict:
    """The fields of a configuration that are not the default ones; always the sizes."""
    return {
        name: value
        for name, value in asdict(config).items()
        if value != getattr(Config(), name) or name in ("chunk", "width")
    }


# The buffer model


def needed(row: Mapping) -> Iterator[tuple[str, float, bool]]:
    """Memory, bytes and whether that is what the program needs, of a compiled row. Where a memory is all but full, the
    planner has spread out: the program may need less."""
    for memory, size in row["peak"].items():
        yield memory, size, size < 0.9 * row["limit"][memory]
    for memory, size in row["needs"].items():
        yield memory, size, True


def buffer_model(table: Iterable[Mapping]) -> dict:
    """Per op and memory: coefficients of `tune.features` by least squares, none negative; the margin that lets through
    all that compiled; the relative error where the need is known, and at how many points."""
    found: dict[str, dict] = {}
    plain = [row for row in table if row["kind"] == "compiled" and row["chip"] == CHIP_OF["A2"]]
    limit_of = {memory: row_limit(memory, CHIP_OF["A2"]) for memory in ("UB", "L1", "L0C")}
    for op, memory in product(tune.OPS, ("UB", "L1", "L0C")):
        known, fine = [], []
        for row in plain:
            if row["op"] != op:
                continue
            x = tune.features(row["K"], Config(**row["config"]))
            known += [(x, size) for name, size, exact in needed(row) if name == memory and exact]
            if row["verdict"] == "passed" and memory in row["peak"]:
                fine.append((x, row["limit"][memory]))
        if not known:
            continue
        # What overflowed says what it needs, what compiled at most that: the planner uses more where there is room.
        points = known + 9 * [(x, size) for x, size in known if size > limit_of[memory]]
        # What compiled needs no more than there is: where an estimate says otherwise, that much is taken as its need.
        while True:
            coefficients = _fit(points)
            above = [point for point in fine if point not in points and _dot(coefficients, point[0]) > point[1]]
            if not above:
                break
            points += above
        excess = max((_dot(coefficients, x) / limit for x, limit in fine), default=1.0)
        errors = [_dot(coefficients, x) / size - 1 for x, size in known]
        found.setdefault(op, {})[memory] = {
            "coefficients": coefficients,
            "margin": round(max(1.0, excess) + 0.005, 3),
            "rms_error": round((sum(error**2 for error in errors) / len(errors)) ** 0.5, 3),
            "points": len(known),
        }
    return found


def _dot(coefficients: Iterable[float], x: Iterable[float]) -> float:
    return sum(a * b for a, b in zip(coefficients, x, strict=True))


def _fit(points: list[tuple[tuple[float, ...], float]]) -> list[float]:
    """Least squares of the relative error without negative coefficients: the best of all subsets of the features."""
    import numpy

    A = numpy.array([[value / size for value in x] for x, size in points])
    best: tuple[float, list[float]] = (math.inf, [0.0] * A.shape[1])
    for count in range(1, A.shape[1] + 1):
        for chosen in combinations(range(A.shape[1]), count):
            columns = list(chosen)
            solution, *_ = numpy.linalg.lstsq(A[:, columns], numpy.ones(len(A)), rcond=None)
            error = float(((A[:, columns] @ solution - 1) ** 2).mean())
            if (solution >= 0).all() and error < best[0] - 1e-9:
                full = numpy.zeros(A.shape[1])
                full[columns] = solution
                best = (error, [round(float(value), 4) for value in full])
    return best[1]


# Trials in the simulator


def try_all(wanted: list[Case], path: Path) -> dict:
    """Runs configurations in the simulator; `trials.json` keeps what was run, by program source."""
    from fla_npu.ops.common.trial import Simulation

    data = read(path)
    done = {(Case.of(row), row["source"]) for row in data["rows"]}
    simulation = Simulation()
    try:
        for case in [one for one in wanted if (one, tune.source_hash()) not in done]:
            started = time.monotonic()
            row = {**case.record(), "source": tune.source_hash(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
            try:
                trial = simulation.trial(
                    case.op, case.config, K=case.K, V=case.V, dtype=case.dtype, fast=case.fast,
                    lower_bound=-5.0 if case.bounded else None,
                )  # fmt: skip
                row |= {"right": trial.right, **{k: float(f"{v:.3g}") for k, v in trial._asdict().items()}, "error": ""}
            except Exception as error:  # a program that hangs or races raises; anything else must not end the others
                row |= {"right": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            row["seconds"] = round(time.monotonic() - started, 1)
            data["rows"] = [old for old in data["rows"] if Case.of(old) != case] + [row]
            data["run"] = describe()
            write(path, data)
            click.echo(f"{case.op} {case.precision} {case.dtype} K{case.K} V{case.V} {case.config}: "
                       f"{'right' if row['right'] else 'WRONG ' + row['error']}", err=True)  # fmt: skip
    finally:
        simulation.close()
    return data


def shipped_cases() -> list[Case]:
    """The configurations in the shipped table that the simulator can run, one call each."""
    cases = []
    for row in json.loads(DEFAULTS.read_text())["rows"]:
        if row["family"] != "A2":
            continue
        dtype = "fp32" if row["precision"] == "fp32" else "bf16"
        for values in (row["config"], *row["other"].values()):
            config = Config(**values).fit(row["V"])
            cases.append(Case(row["op"], "910B3", row["precision"], dtype, row["K"], row["V"], config))
    return list(dict.fromkeys(cases))


# Pictures


def draw(rows: list[Mapping], out: Path) -> list[Path]:
    """A heat map per op and precision: chunk by width, a panel per K and chip."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    for op, precision in product(tune.OPS, tune.PRECISIONS):
        panels = []
        for chip in dict.fromkeys(row["chip"] for row in rows):
            for K in sorted(SIZES):
                cells = {size: row for size, row in sized(rows, chip, op, precision, K).items() if row["V"] == K}
                if cells:
                    panels.append((chip, K, cells))
        if panels:
            drawn.append(_heat_map(op, precision, panels, out / f"{op}-{precision}.png"))
    return drawn


def _value(row: Mapping) -> float:
    value = row.get("nanoseconds") if row["kind"] == "measured" else row.get("cycles")
    return math.nan if value is None or not row["ok"] else value


def _words(row: Mapping) -> str:
    if row["ok"]:
        return f"{_value(row):.0f}" + (f"\n{row['syncs']} syncs" if row["kind"] == "compiled" else "")
    if row.get("needs"):
        return "\n".join(
            f"{memory} {size / row_limit(memory, row['chip']):.1f}x" for memory, size in row["needs"].items()
        )
    if row.get("split") == "lost":
        return "split\nlost"
    return "no" if row.get("verdict") != "passed" else "single\nbuffers"


def row_limit(memory: str, chip: str) -> int:
    """Bytes of an on-core memory."""
    found = find_chip(chip)
    return {"UB": found.ub_bytes, "L1": found.l1_bytes, "L0C": found.l0c_bytes or 1}[memory]


def _heat_map(op: str, precision: str, panels: list, path: Path) -> Path:
    from matplotlib import pyplot

    measured = any(row["kind"] == "measured" for _, _, cells in panels for row in cells.values())
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3 + 2.9 * len(panels), 4.1), squeeze=False)
    for axis, (chip, K, cells) in zip(axes[0], panels, strict=True):
        chunks = sorted({chunk for chunk, _ in cells})
        widths = sorted({width for _, width in cells})
        values = [
            [_value(cells[chunk, width]) if (chunk, width) in cells else math.nan for width in widths]
            for chunk in chunks
        ]
        known = [value for line in values for value in line if not math.isnan(value)]
        image = axis.imshow(values, cmap="viridis_r", aspect="auto", origin="lower")
        if known:
            image.set_clim(min(known), max(max(known), min(known) * 1.01))
        axis.set_facecolor("#dddddd")
        for y, chunk in enumerate(chunks):
            for x, width in enumerate(widths):
                row = cells.get((chunk, width))
                if row is None:
                    continue
                value = _value(row)
                dark = known and value > (min(known) + max(known)) / 2
                best = known and value == min(known)
                axis.text(x, y, _words(row), ha="center", va="center", fontsize=9, color="white" if dark else "black",
                          fontweight="bold" if best else "normal")  # fmt: skip
        axis.set_xticks(range(len(widths)), widths)
        axis.set_yticks(range(len(chunks)), chunks)
        axis.set(title=f"{chip}, K = V = {K}", xlabel="columns of a unit")
    axes[0][0].set_ylabel("tokens of a chunk")
    what = "ns per token, measured" if measured else "estimated cycles per token and head"
    figure.suptitle(f"{TITLES[op]}, {precision}: {what}\nleast in bold; grey: not in the grid, or why it must not ship")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Folder of the results.")
@click.option("--chip", "chips", multiple=True, help="Chips to compile for. [default: 910B3]")
@click.option("--op", "ops", multiple=True, type=click.Choice(tune.OPS), help="Only these ops.")
@click.option("--dim", "dims", multiple=True, type=int, help="Only these K.")
@click.option("--jobs", default=2, help="Compilers at a time.")
@click.option("--rounds", default=5, help="Rounds of measurements, on an NPU.")
@click.option("--compile-only", is_flag=True, help="Compile even where there is an NPU.")
@click.option("--defaults", is_flag=True, help="Write the shipped table from the rows, and stop.")
@click.option("--trial", "simulated", is_flag=True, help="Simulate what the shipped table names, and stop.")
@click.option("--plot", "plot_only", is_flag=True, help="Draw the rows there are, and stop.")
@click.option("--full", is_flag=True, help="Also other dtypes, tiles, compiler options, all sizes with K = 256.")
@click.option("--list", "list_only", is_flag=True, help="Print the grid and stop.")
def main(
    out: Path,
    chips: tuple[str, ...],
    ops: tuple[str, ...],
    dims: tuple[int, ...],
    jobs: int,
    rounds: int,
    compile_only: bool,
    defaults: bool,
    simulated: bool,
    plot_only: bool,
    full: bool,
    list_only: bool,
) -> None:
    """Sweep chunk and tile sizes of the chunk kernel and write JSON rows and heat maps."""
    out.mkdir(parents=True, exist_ok=True)
    device = None if compile_only else _device()
    path = out / ("measured.json" if device else "compiled.json")
    if defaults:
        write(DEFAULTS, ship(read(out / "compiled.json")["rows"], read(out / "trials.json")["rows"]))
        click.echo(f"Wrote {DEFAULTS}", err=True)
        return
    if simulated:
        data = try_all(shipped_cases(), out / "trials.json")
        wrong = [row for row in data["rows"] if row["source"] == tune.source_hash() and not row["right"]]
        click.echo(f"{len(wrong)} configurations are wrong", err=True)
        raise SystemExit(1 if wrong else 0)
    if not plot_only:
        cases = [
            case
            for case in grid([device[0]] if device else chips or ("910B3",), full)
            if (not ops or case.op in ops) and (not dims or case.K in dims)
        ]
        if list_only:
            for case in cases:
                click.echo(str(case))
            return
        table = Table(path, describe())
        if device:
            measure_grid(cases, table, device[1], rounds)
        else:
            compile_grid(cases, table, jobs)
    for picture in draw(read(path)["rows"], out):
        click.echo(f"Drew {picture.name}", err=True)


def usable_by(trials: Iterable[Mapping]):
    """Accepts a configuration unless it has been simulated and was not right. V changes strides only."""
    wrong = {
        (row["op"], row["precision"], row["K"], Config(**row["config"]))
        for row in trials
        if not row["right"] and row["bounded"]
    }
    return lambda key, config: (key.op, key.precision, key.K, config.fit(key.V)) not in wrong


def _device() -> tuple[str, int] | None:
    """Name and cores of the NPU, None without one."""
    try:
        from fla_npu.ops.common import device_timer
    except ImportError:
        return None
    return device_timer.device()


if __name__ == "__main__":
    main()
