"""What `fla_npu.enable()` puts into Python's import system.

* The names `fla` and `causal_conv1d`, when nothing else answers to them: a finder at the end of `sys.meta_path`, so a
  package that is installed always wins. `fla` is a module of its own, for its version; everything below it is this
  package's module of the same path, the same object.
* Word of modules that were just imported, for those to be patched that come later.

transformers' modeling modules and FLA's do not see the two names: they bind what they find for good, and they are
served in another way.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fla_npu.integrations.report import lock

STAND_INS = {"fla": ("fla_npu", "0.6.0"), "causal_conv1d": ("fla_npu.integrations.causal_conv1d", "1.5.0")}
"""Import name -> the module that stands in for it, and the version of the interface."""


class _Root(ModuleType):
    """`fla` or `causal_conv1d`: what the module that stands in has, under another name and version."""

    def __init__(self, name: str, hiding: threading.local) -> None:
        target, version = STAND_INS[name]
        self._hiding = hiding
        super().__init__(name, f"`{name}`, answered by {target}: see fla_npu.enable.")
        self.__version__ = version
        self._target = target

    def __getattribute__(self, name: str) -> Any:
        # Another thread may have imported it while this one is not to see it: `_Installed.hidden`.
        if not name.startswith("_") and getattr(self._hiding, "on", False):
            raise ModuleNotFoundError(f"No module named {self.__name__!r}", name=self.__name__)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        target = importlib.import_module(self._target)
        if hasattr(target, name):
            return getattr(target, name)
        try:  # packages such as `layers`, which FLA's root imports and this package's does not
            return importlib.import_module(f"{self._target}.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from error


class _RootLoader(Loader):
    def __init__(self, root: _Root) -> None:
        self.root = root

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.root

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "fla":
            _mirror()


class _TwinLoader(Loader):
    """Answers an import with a module that exists under another name, and leaves that as it was."""

    def __init__(self, twin: ModuleType) -> None:
        self.twin = twin
        self.spec, self.loader = twin.__spec__, twin.__loader__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.twin

    def exec_module(self, module: ModuleType) -> None:
        # The import system has overwritten `__spec__`, on which relative imports within the module rely.
        module.__spec__, module.__loader__ = self.spec, self.loader
        _mirror()


def _mirror() -> None:
    """Every loaded module of this package under `fla` too.

    What is found in `sys.modules` is not bound in its parent; for a package that rebinds the name of a submodule, such
    as `modules.conv`, that would be wrong.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("fla_npu."):
            sys.modules.setdefault(f"fla.{name.removeprefix('fla_npu.')}", module)


class _Installed:
    """State shared by the two finders."""

    def __init__(self, watched: Callable[[str], bool], imported: Callable[[ModuleType], None]) -> None:
        self.hiding = threading.local()
        self.roots = {name: _Root(name, self.hiding) for name in STAND_INS}
        self.watched, self.imported = watched, imported
        self.active = False

    def stands_in(self, name: str) -> bool:
        return name in self.roots and sys.modules.get(name) is self.roots[name]

    def answered(self) -> dict[str, ModuleType]:
        """Entries of `sys.modules` that exist because of the stand-ins."""
        found: dict[str, ModuleType] = {name: root for name, root in self.roots.items() if self.stands_in(name)}
        if "fla" in found:
            for name, module in list(sys.modules.items()):
                if name.startswith("fla.") and module is sys.modules.get(f"fla_npu.{name.removeprefix('fla.')}"):
                    found[name] = module
        return found

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Nothing answers for `fla` and `causal_conv1d` in this thread."""
        taken = self.answered()
        before, self.hiding.on = getattr(self.hiding, "on", False), True
        for name in taken:
            sys.modules.pop(name, None)
        _forget_answers()
        try:
            yield
        finally:
            self.hiding.on = before
            _forget_answers()
            with lock:
                for name, module in taken.items() if self.active else ():
                    sys.modules.setdefault(name, module)


class _First(MetaPathFinder):
    """Answers names below `fla` while that is this package, and watches imports."""

    def __init__(self, installed: _Installed) -> None:
        self.installed = installed
        self.asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("fla.") and self.installed.stands_in("fla"):
            return _twin_spec(fullname)
        asked = vars(self.asking).setdefault("names", set())
        if fullname in asked or not self.installed.watched(fullname):
            return None
        asked.add(fullname)  # of another finder that asks all others, too
        try:
            spec = _spec_from_others(self, fullname, path, target)
        finally:
            asked.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchedLoader(spec.loader, self.installed)
        return spec


class _Last(MetaPathFinder):
    """Answers `fla` and `causal_conv1d`; asked only when no other finder does."""

    def __init__(self, installed: _Installed) -> None:
        self.installed = installed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = self.installed.roots.get(fullname)
        if root is None or getattr(self.installed.hiding, "on", False):
            return None
        return ModuleSpec(fullname, _RootLoader(root), origin=STAND_INS[fullname][0], is_package=True)


class _WatchedLoader(Loader):
    """Loads a module by its own loader, which it leaves in its place, and tells of it."""

    def __init__(self, loader: Any, installed: _Installed) -> None:
        self.loader, self.installed = loader, installed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        with self.installed.hidden():
            self.loader.exec_module(module)
        self.installed.imported(module)

    def __getattr__(self, name: str) -> Any:
        """What else a loader can do, such as `get_code` for `python -m`."""
        return getattr(self.loader, name)


def _twin_spec(fullname: str) -> ModuleSpec | None:
    name = f"fla_npu.{fullname.removeprefix('fla.')}"
    try:
        twin = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise
    return ModuleSpec(fullname, _TwinLoader(twin), origin=name, is_package=hasattr(twin, "__path__"))


def _spec_from_others(
    finder: MetaPathFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for other in list(sys.meta_path):
        if other is not finder and hasattr(other, "find_spec"):
            spec = other.find_spec(fullname, path, target)
            if spec is not None:
                return spec
    return None


class ImportHooks:
    """The finders, to be installed and removed.

    Args:
        watched: whether to tell of the import of the module of that name, which does not see the stand-ins.
        imported: told of such a module after it has run, while installed.
    """

    def __init__(self, watched: Callable[[str], bool], imported: Callable[[ModuleType], None]) -> None:
        self._installed = _Installed(watched, self._tell)
        self._told = imported
        self._first, self._last = _First(self._installed), _Last(self._installed)

    def install(self) -> None:
        with lock:
            _forget_answers()
            self._installed.active = True
            sys.meta_path.insert(0, self._first)
            sys.meta_path.append(self._last)

    def remove(self) -> None:
        """Nothing of this is left in `sys.meta_path` and `sys.modules`; modules imported meanwhile stay usable."""
        with lock:
            self._installed.active = False
            for finder in (self._first, self._last):
                if finder in sys.meta_path:
                    sys.meta_path.remove(finder)
            for name in self._installed.answered():
                sys.modules.pop(name, None)
            _forget_answers()

    def _tell(self, module: ModuleType) -> None:
        with lock:
            if self._installed.active:
                self._told(module)


def _forget_answers() -> None:
    """transformers keeps what it found out about the two names, which is another thing from here on."""
    transformers = sys.modules.get("transformers.utils.import_utils")
    for name in ("is_flash_linear_attention_available", "is_causal_conv1d_available"):
        # Not kept in 4.57.
        getattr(getattr(transformers, name, None), "cache_clear", lambda: None)()


def installed_elsewhere(name: str) -> bool:
    """Whether a package of that name exists beside the stand-in."""
    if name in sys.modules:
        return sys.modules[name] is not None and not isinstance(sys.modules[name], _Root)
    specs = (finder.find_spec(name, None) for finder in list(sys.meta_path) if hasattr(finder, "find_spec"))
    return any(spec is not None and not isinstance(spec.loader, _RootLoader) for spec in specs)
