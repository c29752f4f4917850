"""Running the vendor's compiler on Linalg text, up to the closed back end that only CANN ships."""

import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Literal

from fla_npu import settings
from fla_npu.compiler.lower import require_extra

Verdict = Literal["passed", "overflow", "crash", "error", "timeout"]

MEMORIES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}
"""The compiler's name of a memory -> the usual one."""

# The compiler calls its back end and fails without one. This stands in for it: everything up to it is the same, and the
# compiler for A5 does not repeat the whole compilation five times.
_BACK_END = '#!/bin/sh\ncase "$*" in *--version*) echo "hivmc 1.2.0" ;; esac\nexit 0\n'
_LOG_LIMIT = 20_000

# The final program for A5 is jumps and register instructions. Here loops are loops and library calls are calls, and
# memory is planned and cores synchronised as in the final one.
_A5_STAGE = "convert-hivm-to-std"


@dataclass(frozen=True)
class Outcome:
    """What one run of the vendor's compiler said, and the final IR."""

    verdict: Verdict
    needs: tuple[tuple[str, int, int], ...]
    """Memories that overflowed, with the bits they would need and the bits there are."""
    retried: bool
    """The buffers fitted only after multi-buffering was switched off."""
    split_reverted: bool
    """A5's message that the split over two vector cores was given up."""
    message: str
    """Why it failed, on one line; empty where it did not."""
    log: str
    module: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Outcome":
        return cls(**{**record, "needs": tuple(tuple(need) for need in record["needs"])})


def version() -> str:
    """Version of the package that holds the compilers.

    Raises:
        MissingExtraError: it is not installed.
    """
    require_extra()
    return metadata.version("ascendnpu-ir")


def command(binary: str, target: str, flags: Sequence[str]) -> list[str]:
    """The arguments that triton-ascend passes for this target, and the ones that print source locations."""
    tail = ["--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true", "--enable-debug-info=true"]
    if binary == "bishengir-compile":
        tail.insert(1, "--enable-hivm-compile=true")
    else:
        tail += [f"--mlir-print-ir-after={_A5_STAGE}", "--mlir-print-debuginfo"]
    return [f"--target={target}", *flags, *tail]


def run(linalg: str, binary: str, target: str, flags: Sequence[str] = (), timeout: float = 600.0) -> Outcome:
    """Compiles Linalg text with `bishengir-compile` or `bishengir-compile-a5`.

    Raises:
        MissingExtraError: the compilers are not installed.
    """
    require_extra()
    executable = Path(str(resources.files("ascendnpuir") / "bin" / binary))
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for name in ("hivmc", "hivmc-a5"):
            stand_in = work / "bin" / name
            stand_in.parent.mkdir(exist_ok=True)
            stand_in.write_text(_BACK_END)
            stand_in.chmod(0o755)
        source, final = work / "kernel.ttadapter.mlir", work / "module.hivm.opt.mlir"
        source.write_text(linalg)
        arguments = [str(executable), str(source), *command(binary, target, flags)]
        arguments += [f"--save-temps={work}", "-o", str(work / "kernel")]
        environment = settings.tool_environment(work / "bin")
        try:
            done = subprocess.run(
                arguments, capture_output=True, text=True, errors="replace", timeout=timeout, env=environment, cwd=work
            )
        except subprocess.TimeoutExpired:
            return Outcome("timeout", (), False, False, f"no result within {timeout:g} s", "", "")
        module = final.read_text() if final.exists() else ""
        log, stage = _cut_stage((done.stdout + done.stderr).replace(directory, "."))
        if module and stage:
            module = stage
    return _outcome(done.returncode, log, module)


def _cut_stage(text: str) -> tuple[str, str]:
    """Takes the printed stages out of a log; returns the rest and the last of them."""
    log: list[str] = []
    stages: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("// -----// IR Dump After"):
            stages.append([])
            inside = True
        elif inside and re.match(r"[#} ]|module|$", line):
            stages[-1].append(line)
        else:
            inside = False
            log.append(line)
    return "\n".join(log), "\n".join(stages[-1]) if stages else ""


def _message(code: int, log: str) -> str:
    """The compiler's own first words on what went wrong, or the signal that ended it."""
    for pattern in (r"LLVM ERROR: .*", r"error: (?!External hivmc).*", r"\[ERROR\] (?!.*hivmc).*"):
        found = re.search(pattern, log)
        if found:
            return found.group()[:300]
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return log.strip()[-300:]


def _outcome(code: int, log: str, module: str) -> Outcome:
    needs: dict[str, tuple[int, int]] = {}
    for memory, bits, limit in re.findall(r"(\w+) overflow, requires (\d+) bits while (\d+) bits", log):
        # Several attempts print several figures; the last is that of the last attempt.
        needs[MEMORIES.get(memory, memory)] = int(bits), int(limit)
    verdict: Verdict
    if module and code == 0:
        verdict = "passed"
    elif needs:
        verdict = "overflow"
    else:
        verdict = "crash" if code < 0 else "error"
    return Outcome(
        verdict=verdict,
        needs=() if verdict == "passed" else tuple((memory, *bits) for memory, bits in sorted(needs.items())),
        retried="[NOTE] Ub overflow detected" in log,
        split_reverted="[hivm-bind-sub-block] revert" in log,
        message="" if verdict == "passed" else _message(code, log),
        log=log[-_LOG_LIMIT:],
        module=module if verdict == "passed" else "",
    )
