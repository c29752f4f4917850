"""Lowering to Linalg, in worker processes (see `worker.py`)."""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from types import TracebackType

from fla_npu.compiler.build import KernelBuild
from fla_npu.errors import MissingExtraError


class LoweringError(RuntimeError):
    """The front end refused a kernel; the message is its own."""


@dataclass(frozen=True)
class Lowered:
    """Text of a kernel after the front end, and what its arguments are called."""

    ttir: str
    linalg: str
    arguments: tuple[str, ...]
    mix_mode: str
    kernel: str


def require_extra() -> None:
    """Raises `MissingExtraError` unless both triton-ascend and the vendor's compilers are installed."""
    try:
        metadata.version("triton-ascend")
    except metadata.PackageNotFoundError:
        raise MissingExtraError("triton-ascend", "compile") from None
    if util.find_spec("ascendnpuir") is None:
        raise MissingExtraError("ascendnpu-ir", "compile")


class Lowerer:
    """A worker process, started at the first call and kept until `close`; not for use by two threads at once."""

    def __init__(self) -> None:
        require_extra()
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, build: KernelBuild) -> Lowered:
        """Raises `LoweringError` with the front end's message."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(build.to_json() + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            raise LoweringError(f"{build.name}: the front end died with code {process.returncode}")
        answer = json.loads(line)
        if "error" in answer:
            raise LoweringError(f"{build.name}: {answer['error']}")
        return Lowered(**{**answer, "arguments": tuple(answer["arguments"])})

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            root = str(Path(__file__).resolve().parents[2])
            code = f"import sys; sys.path.insert(0, {root!r}); from fla_npu.compiler.worker import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def __enter__(self) -> "Lowerer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lower(build: KernelBuild) -> Lowered:
    """Lowers one build in a worker of its own."""
    with Lowerer() as lowerer:
        return lowerer(build)
