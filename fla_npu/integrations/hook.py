"""`fla_npu.enable()`, `disable()` and `enabled()`: one switch for transformers, FLA and code written for FLA.

| what is there          | what enabling does                                                                        |
|------------------------|-------------------------------------------------------------------------------------------|
| transformers           | its linear-attention layers call this package's ops, see `integrations.transformers`      |
| FLA 0.6 or later       | it serves FLA's ops and layers on CPUs and NPUs, see `integrations.fla_backend`           |
| no FLA                 | `import fla` gives this package, see `integrations.imports`                               |
| no `causal_conv1d`     | `import causal_conv1d` gives `integrations.causal_conv1d`                                 |

Modules that are imported later are taken care of when they are. Disabling leaves nothing behind.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING

from fla_npu.integrations import fla_backend, transformers
from fla_npu.integrations.imports import STAND_INS, ImportHooks, blocked, installed_elsewhere
from fla_npu.integrations.report import Report, lock

if TYPE_CHECKING:
    from fla_npu.integrations.layers import LayerHook

FLA_DISTRIBUTIONS = ("fla-core", "flash-linear-attention")


class _Active:
    """Everything that is in place while this package is enabled."""

    def __init__(self) -> None:
        self.report = Report()
        self.transformers = transformers.Hook(transformers.serve, self.report)
        self.fla = fla_backend.FlaHook(self.report)
        self.layers: LayerHook | None = None
        self.imports = ImportHooks(_is_watched, self.attach)

    def start(self) -> None:
        _describe(self.report)
        self.imports.install()

    def extend(self, layers: bool) -> None:
        self.transformers.extend()
        self.fla.extend()
        if layers and _version("transformers") is not None:
            if self.layers is None:
                from fla_npu.integrations.layers import LayerHook

                self.layers = LayerHook(self.transformers, self.report)
            self.layers.extend()

    def attach(self, module: ModuleType) -> None:
        if _is_modeling(module.__name__):
            self.transformers.attach(module)
            if self.layers is not None:
                self.layers.attach(module)
        elif module.__name__ in fla_backend.TARGETS:
            self.fla.attach(module)

    def undo(self) -> None:
        with lock:
            self.imports.remove()
            if self.layers is not None:
                self.layers.undo()
            self.transformers.undo()
            self.fla.undo()


_switch = threading.RLock()
_active: _Active | None = None
_users = 0
"""`enabled()` blocks that are open, in all threads."""
_kept_on = False
"""Whether `enable()` was called."""


def enable(*, layers: bool = False) -> Report:
    """Serve the linear attention of transformers, of FLA and of code written for FLA with this package.

    From then on
    * models of transformers 4.57 and later (Qwen3-Next, Qwen3.5, OLMo-hybrid, Kimi-Linear, Ling, ...) run on this
      package's ops, whether they are built already or come later;
    * an installed FLA 0.6 or later hands its ops, and on a CPU its layers, to this package;
    * where FLA is not installed, `import fla` gives this package, and where `causal_conv1d` is not, that name gives its
      two functions: what the remote code of Kimi-Linear, Ling and AFM imports.

    Only calls on CPU and NPU tensors are served; others go where they went before. Idempotent, and safe in any thread.

    Args:
        layers: also replace transformers' linear-attention layers as a whole (transformers 5.22 and later): those of
            models that exist, and of models that `from_pretrained` and `from_config` build from now on. See
            `integrations.layers`.

    Returns:
        A report of what was replaced, left alone and called. The same one until `disable()`.
    """
    global _kept_on
    with _switch:
        report = _extend(layers)
        _kept_on = True
        return report


def disable() -> None:
    """Undo `enable()`, also inside `enabled()` blocks, and put back the very objects that were there before.

    Modules imported meanwhile become what they would have been. Does nothing when nothing is enabled.
    """
    global _active, _kept_on
    with _switch:
        _kept_on = False
        if _active is not None:
            _active.undo()
            _active = None


@contextmanager
def enabled(*, layers: bool = False) -> Iterator[Report]:
    """`enable(...)` for the length of a `with` block, or longer if another block or an `enable()` keeps it on."""
    global _users
    with _switch:
        _users += 1
        try:
            report = _extend(layers)
        except BaseException:
            _leave()
            raise
    try:
        yield report
    finally:
        with _switch:
            _leave()


def _leave() -> None:
    global _users
    _users -= 1
    if _users == 0 and not _kept_on:
        disable()


def _extend(layers: bool) -> Report:
    global _active
    started = None
    try:
        if _active is None:
            # Known before it starts: looking for FLA may run a finder that enables, such as the one of a `.pth` file.
            _active = started = _Active()
            _active.start()
        _active.extend(layers)
    except BaseException:
        # As before the call, for another one to try.
        if started is not None:
            started.undo()
            _active = None
        raise
    return _active.report


def _is_modeling(name: str) -> bool:
    return transformers.MODELING.fullmatch(name) is not None


def _is_watched(name: str) -> bool:
    """Modules that are served by replacing what they define."""
    return _is_modeling(name) or name.startswith("fla.")


def _describe(report: Report) -> None:
    """Routes and reasons, for people."""
    version = _version("transformers")
    if version is None:
        report.skipped["transformers"] = "not installed"
    else:
        report.routes["transformers"] = f"{version}: its linear-attention layers call fla_npu"
    for name, (_, interface) in STAND_INS.items():
        if blocked(name):
            report.skipped[name] = "somebody forbids its import: it is None in sys.modules"
        elif not installed_elsewhere(name):
            report.routes[name] = f"not installed: the name is answered by fla_npu, with the interface of {interface}"
    known = {*report.routes, *report.skipped}
    if "causal_conv1d" not in known:
        report.skipped["causal_conv1d"] = "installed, for code that imports it"
    if "fla" not in known:
        version = next(filter(None, map(_version, FLA_DISTRIBUTIONS)), None) or "of unknown version"
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and tuple(map(int, numbers.groups())) < (0, 6):
            report.skipped["fla"] = f"FLA {version} has no registry of backends yet: 0.6 has"
        elif not installed_elsewhere("triton"):
            report.skipped["fla"] = f"FLA {version} is installed, and cannot be imported without triton"
        else:
            report.routes["fla"] = f"FLA {version}: fla_npu is a backend of its ops, and on a CPU serves its layers"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
