"""Compiling builds for chips, one or many."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fla_npu.compiler import bishengir, cache, hivm
from fla_npu.compiler.build import KernelBuild
from fla_npu.compiler.handoffs import HandOff, explain_syncs
from fla_npu.compiler.lower import Lowered, Lowerer, LoweringError
from fla_npu.compiler.report import Report, analyse, failed, unread
from fla_npu.planner.chips import Chip, chip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """A build for a chip: the report and the texts it was read from."""

    build: KernelBuild
    chip: str
    report: Report
    lowered: Lowered | None
    outcome: bishengir.Outcome | None

    @cached_property
    def module(self) -> hivm.Module:
        """The parsed final program.

        Raises:
            ValueError: the build did not compile.
        """
        if self.outcome is None or not self.outcome.module:
            raise ValueError(f"build must have compiled, got {'; '.join(self.report.problems)}")
        return hivm.parse(self.outcome.module)

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.lowered.arguments if self.lowered else ()

    def hand_offs(self) -> tuple[HandOff, ...]:
        """The cross-core hand-offs of the chunk loop (see `explain_syncs`)."""
        return explain_syncs(self.module, self.arguments)

    def save(self, directory: Path) -> list[Path]:
        """Writes Triton IR, Linalg, final program and log; returns the paths."""
        stem = f"{self.build.name}.{self.chip}"
        texts = {
            "ttir": self.lowered.ttir if self.lowered else "",
            "linalg": self.lowered.linalg if self.lowered else "",
            "hivm": self.outcome.module if self.outcome else "",
            "log": self.outcome.log if self.outcome else self.report.message,
        }
        directory.mkdir(parents=True, exist_ok=True)
        paths = []
        for kind, text in texts.items():
            if text:
                path = directory / f"{stem}.{kind}{'' if kind == 'log' else '.mlir'}"
                path.write_text(text)
                paths.append(path)
        return paths


def compile_build(
    build: KernelBuild,
    chip_name: str = "910B3",
    *,
    lowerer: Callable[[KernelBuild], Lowered] | None = None,
    use_cache: bool = True,
) -> Compiled:
    """Compiles one build for one chip.

    Args:
        build: what to compile.
        chip_name: a chip of `fla_npu.planner.chips` that the vendor's compiler has a target for.
        lowerer: a worker to reuse, instead of one started for this call.
        use_cache: take the vendor compiler's result from disk if it is there.

    Raises:
        MissingExtraError: triton-ascend or the compilers are not installed.
        ValueError: the chip is unknown or has no compiler.
    """
    target = compilable(chip_name)
    head = {
        "name": build.name,
        "kernel": build.kernel,
        "chip": target.name,
        "target": target.target or "",
        "compiler": f"{target.compiler} {bishengir.version()}",
    }
    own = None
    if lowerer is None:
        lowerer = own = Lowerer()
    try:
        lowered = lowerer(build)
    except LoweringError as error:
        return Compiled(build, target.name, failed(head, str(error)), None, None)
    finally:
        if own is not None:
            own.close()
    assert target.target is not None and target.compiler is not None
    flags = build.compiler_flags()
    name = cache.key(lowered.ttir, lowered.linalg, target.compiler, target.target, flags, bishengir.version())
    outcome = cache.load(name) if use_cache else None
    if outcome is None:
        outcome = bishengir.run(lowered.linalg, target.compiler, target.target, flags)
        if use_cache:
            try:
                cache.store(name, outcome)
            except OSError as error:
                logger.warning("the result of compiling %s is not kept: %s", build.name, error)
    module = None
    try:
        module = hivm.parse(outcome.module) if outcome.module else None
    except hivm.ParseError as error:
        report = unread(outcome, head, str(error))
    else:
        report = analyse(outcome, module, lowered.arguments, head)
    compiled = Compiled(build, target.name, report, lowered, outcome)
    if module is not None:
        compiled.__dict__["module"] = module
    return compiled


def compilable(name: str) -> Chip:
    """The chip of this name.

    Raises:
        ValueError: it is unknown, or the vendor's compiler has no target for it.
    """
    found = chip(name)
    if found.target is None or found.compiler is None:
        raise ValueError(
            f"chip must be one that the vendor's compiler has a target for, got {found.name}: {found.no_triton_reason}"
        )
    return found


def compile_many(
    builds: Iterable[KernelBuild],
    chips: Sequence[str] = ("910B3",),
    *,
    jobs: int = 2,
    progress: Callable[[Compiled], None] | None = None,
    use_cache: bool = True,
) -> list[Compiled]:
    """Compiles every build for every chip on `jobs` processes at a time; the result is in the order of the arguments.

    Args:
        progress: called with each result as it comes, in the order of completion.

    Raises:
        ValueError: a chip is unknown or has no compiler, or `jobs` is below 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    work = [(build, compilable(name).name) for build in builds for name in chips]
    lowerers: queue.SimpleQueue[Lowerer] = queue.SimpleQueue()
    started: list[Lowerer] = []
    for _ in range(min(jobs, max(1, len(work)))):
        started.append(Lowerer())
        lowerers.put(started[-1])
    lock = threading.Lock()

    def one(item: tuple[KernelBuild, str]) -> Compiled:
        # The threads only wait for processes: the front end's worker and the vendor's compiler.
        lowerer = lowerers.get()
        try:
            result = compile_build(*item, lowerer=lowerer, use_cache=use_cache)
        finally:
            lowerers.put(lowerer)
        if progress is not None:
            with lock:
                progress(result)
        return result

    try:
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            return list(pool.map(one, work))
    finally:
        for lowerer in started:
            lowerer.close()
