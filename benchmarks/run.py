"""`python -m benchmarks.run`: measure, save, summarise, plot.

One child process measures everything at one number of threads, a fresh one measures each memory point. What a child has
finished is saved at once; a child that dies costs the case it was in and the run goes on."""

from __future__ import annotations

import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import click
import psutil
from tqdm import tqdm

from benchmarks import plots, report, rows
from benchmarks.registry import BY_NAME, IMPLEMENTATIONS, MODES, OPS, OURS, Case, cases, implementations, memory_cases

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fla-npu", "torch", "transformers", "fla-core", "triton", "ggml-python", "numpy")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "sve")
STALLED_SECONDS = 300
"""A worker that says nothing for so long is ended."""
MEMORY_SECONDS = 60.0
"""Limit of the one call of a memory point."""
MEMORY_GIGABYTES = 16.0
"""Limit of a memory point. Higher than when timing, where the inputs of all implementations are there at once."""


def describe_run(grid: str) -> dict:
    """Machine, versions and commit. No host or user name."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "grid": grid,
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "features": _cpu_features(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "fla_npu", "benchmarks/*.py")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+changes" if changed else "")


def _cpu_field(name: str) -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def _cpu_name() -> str:
    return _cpu_field("model name") or platform.processor() or "unknown"


def _cpu_features() -> list[str]:
    present = (_cpu_field("flags") or _cpu_field("Features")).split()
    return [feature for feature in CPU_FEATURES if feature in present]


class Child:
    """A worker process as an iterator over its events. Ends it when it stalls or the run is interrupted."""

    def __init__(self, module: str, request: dict, threads: int):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.remarks: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._drain, daemon=True).start()
        self.process.stdin.write(json.dumps(request))
        self.process.stdin.close()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _drain(self) -> None:
        for line in self.process.stderr:
            self.remarks = [*self.remarks[-19:], line.rstrip()]

    def events(self) -> Iterator[dict]:
        try:
            while (line := self.lines.get(timeout=STALLED_SECONDS)) is not None:
                yield json.loads(line)
            self.process.wait()
        except queue.Empty:
            self.remarks.append(f"no answer for {STALLED_SECONDS} s")
        finally:
            self.process.kill()
            self.process.wait()

    def epitaph(self) -> str:
        return f"worker ended with status {self.process.returncode}: {(self.remarks or ['no message'])[-1][:300]}"


class Results:
    """Rows of one file and the runs they come from, saved after every row."""

    def __init__(self, path: Path, run: dict, keep: bool):
        kept = rows.load(path) if keep else {"runs": [], "rows": []}
        self.path = path
        self.runs = [*kept["runs"], run]
        self.by_identity = {rows.identity(record): record for record in kept["rows"]}

    @property
    def records(self) -> list[dict]:
        return list(self.by_identity.values())

    def add(self, record: dict) -> None:
        record = {**record, "run": len(self.runs) - 1}
        self.by_identity[rows.identity(record)] = record
        rows.save(self.path, self.runs, self.records)


def measure_times(
    plan: list[Case], names: tuple[str, ...], threads: int, limits: rows.Limits, results: Results
) -> str | None:
    """Fill in the timing rows of one number of threads. Returns why the run must stop, if it must."""
    left, blamed, done = list(plan), [], []
    total = sum(len(implementations(case, names)) for case in plan)
    with tqdm(total=total, desc=f"timing, threads {threads}", unit="row", file=sys.stderr, mininterval=1) as progress:
        while left:
            request = {
                "threads": threads,
                "names": names,
                "limits": asdict(limits),
                "blamed": blamed,
                "done": done,
                "cases": [case.record() for case in left],
            }
            child = Child("benchmarks.worker", request, threads)
            doing = None
            for event in child.events():
                if event["event"] == "doing":
                    doing = event
                    progress.set_postfix_str(f"{event['case']}: {event['implementation']}", refresh=False)
                elif event["event"] == "row":
                    done.append(event["row"])
                    results.add(event["row"])
                    progress.update()
                else:
                    return event["reason"]
            if child.process.returncode == 0:
                return None
            if doing is None:
                return child.epitaph()
            tqdm.write(f"{doing['case']}: {doing['implementation']}: {child.epitaph()}", file=sys.stderr)
            blamed.append((doing["case"], doing["implementation"], child.epitaph()))
            left = left[next(i for i, case in enumerate(left) if case.key == doing["case"]) :]
            # The case starts again without the one to blame; its rows are replaced and not counted twice.
            again = [record for record in done if rows.case_of(record) == left[0]]
            done = [record for record in done if rows.case_of(record) != left[0]]
            progress.update(-len(again))
    return None


def measure_memory(
    plan: list[Case], names: tuple[str, ...], threads: int, limits: rows.Limits, results: Results
) -> None:
    done = []
    points = [(case, one) for case in plan for one in implementations(case, names) if one.memory_row]
    with tqdm(points, desc="memory", unit="row", file=sys.stderr) as progress:
        for case, implementation in progress:
            name = implementation.name
            progress.set_postfix_str(f"{case.key}: {name}")
            reason = rows.predict(case, name, done, limits)
            if reason is not None:
                results.add(rows.row(case, name, threads, rows.SKIPPED, reason))
                continue
            request = {"case": case.record(), "implementation": name, "threads": threads}
            child = Child("benchmarks.memory", request, threads)
            values = list(child.events())
            if child.process.returncode == 0 and values:
                record = rows.row(case, name, threads, rows.OK, median_s=values[0].pop("seconds"), **values[0])
            else:
                record = rows.row(case, name, threads, rows.FAILED, child.epitaph())
            done.append(record)
            results.add(record)


def warn_if_busy() -> None:
    busy = psutil.cpu_percent(interval=1.0) / 100 * (os.cpu_count() or 1)
    if busy > report.BUSY_CORES:
        click.secho(
            f"The machine is busy: other processes use {busy:.1f} cores. Times will be off.", fg="red", err=True
        )


def _available_gb() -> float:
    return psutil.virtual_memory().available / 1e9


def _names(value: str | None, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",")) if value else ()
    for name in names:
        if name not in allowed:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(allowed)}", param_hint=option)
    return names


@click.command(context_settings={"show_default": True})
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("benchmarks/results"), help="Folder of the results."
)
@click.option("--quick", "grid", flag_value="quick", help="Tiny shapes, one thread: does everything run?")
@click.option(
    "--default", "grid", flag_value="default", default="default", help="A star around T 4096, 16 heads of 128."
)
@click.option("--full", "grid", flag_value="full", help="The arms of the star at every length and dtype (hours).")
@click.option("--ops", help=f"Comma-separated from {', '.join(OPS)}. [default: all]")
@click.option("--modes", help=f"Comma-separated from {', '.join(MODES)}. [default: all]")
@click.option("--only", help=f"Implementations, comma-separated from {', '.join(BY_NAME)}. [default: all]")
@click.option("--case", "pattern", help="Only the cases whose name contains this text, e.g. 'T4096 H16 D128 fp32'.")
@click.option("--threads", help="Comma-separated numbers of threads. [default: 1,2; quick: 1]")
@click.option("--budget", type=float, default=rows.Limits.budget, help="Seconds per implementation and case.")
@click.option("--max-seconds", type=float, default=rows.Limits.seconds, help="Skip calls predicted to take longer.")
@click.option("--max-gb", type=float, default=rows.Limits.gigabytes, help="Skip calls predicted to need more memory.")
@click.option("--timing/--no-timing", default=True)
@click.option("--memory/--no-memory", default=True)
@click.option("--keep/--no-keep", help="Keep the rows of earlier runs that this run does not measure.")
@click.option("--list", "list_only", is_flag=True, help="Print the cases and stop.")
def main(
    out: Path,
    grid: str,
    ops: str | None,
    modes: str | None,
    only: str | None,
    pattern: str | None,
    threads: str | None,
    budget: float,
    max_seconds: float,
    max_gb: float,
    timing: bool,
    memory: bool,
    keep: bool,
    list_only: bool,
) -> None:
    """Time fla_npu and its peers on this CPU and write JSON rows, a Markdown summary and plots.

    Every implementation must first agree with an fp64 token recurrence. An interrupted run (Ctrl-C) keeps its rows."""
    wanted_ops = _names(ops, OPS, "--ops") or OPS
    wanted_modes = _names(modes, MODES, "--modes") or MODES
    names = _names(only, tuple(BY_NAME), "--only")
    counts = [int(count) for count in (threads or ("1" if grid == "quick" else "1,2")).split(",")]

    def wanted(case: Case) -> bool:
        return case.op in wanted_ops and case.mode in wanted_modes and (pattern or "") in case.key

    plan = [case for case in cases(grid) if wanted(case)]
    memory_plan = [case for case in memory_cases(grid) if wanted(case)]
    if list_only:
        for case in plan:
            click.echo(f"{case.key}: {', '.join(one.name for one in implementations(case, names))}")
        return
    warn_if_busy()
    run = describe_run(grid)
    stop = None
    try:
        if timing:
            limits = rows.Limits(
                max_seconds, min(max_gb, _available_gb() / 2), budget if grid != "quick" else min(budget, 0.2)
            )
            results = Results(out / "timings.json", run, keep)
            for count in counts:
                stop = stop or measure_times(plan, names, count, limits, results)
        if memory and not stop:
            limits = rows.Limits(MEMORY_SECONDS, gigabytes=min(MEMORY_GIGABYTES, 0.75 * _available_gb()))
            points = names or ((OURS,) if grid == "quick" else tuple(one.name for one in IMPLEMENTATIONS))
            measure_memory(memory_plan, points, max(counts), limits, Results(out / "memory.json", run, keep))
    except KeyboardInterrupt:
        stop = "interrupted"
    out.mkdir(parents=True, exist_ok=True)
    timings, memory_rows = rows.load(out / "timings.json"), rows.load(out / "memory.json")
    (out / "summary.md").write_text(report.summary(timings, memory_rows))
    plots.draw_all(out, timings["rows"], memory_rows["rows"])
    click.echo(f"Results in {out}", err=True)
    if stop:
        raise click.ClickException(f"{stop}. The rows measured until then are saved.")


if __name__ == "__main__":
    main()
