"""What `fla_npu.enable()` puts into Python's import system.

* The names `fla` and `causal_conv1d`, when no other finder has a package for them: one that is installed always wins. A
  folder of that name without any module does not count: data, or what an uninstalled package has left. `fla` is a
  module of its own, for its version; everything below it is this package's module of the same path, the same object.
* Word of modules that were just imported, for those to be patched that come later.

transformers' modeling modules and FLA's do not see the two names: they bind what they find for good, and they are
served in another way.
"""

import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from fla_npu.integrations.report import lock
from fla_npu.utils import FLA_VERSION

STAND_INS = {"fla": ("fla_npu", FLA_VERSION), "causal_conv1d": ("fla_npu.integrations.causal_conv1d", "1.5.0")}
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
        if name == "__all__" and self.__name__ == "fla":
            # As FLA: without configurations, and without what needs an extra that is not there.
            parts = [importlib.import_module(f"{self._target}.{part}") for part in ("layers", "models")]
            return [x for part in parts for x in part.__all__ if x in vars(part) and not x.endswith("Config")]
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

    def get_resource_reader(self, fullname: str) -> Any:
        target = importlib.import_module(self.root._target)
        return target.__loader__.get_resource_reader(target.__name__)  # type: ignore[union-attr]


class _TwinLoader(Loader):
    """Answers an import with a module that exists under another name, and leaves that as it was."""

    def __init__(self, twin: ModuleType) -> None:
        self.twin = twin
        self.spec = twin.__spec__
        self.loader: Any = twin.__loader__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.twin

    def exec_module(self, module: ModuleType) -> None:
        # The import system has overwritten `__spec__`, on which relative imports within the module rely.
        module.__spec__, module.__loader__ = self.spec, self.loader
        _mirror()

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m` and `runpy`."""
        return self.loader.get_code(self.twin.__name__)


def _mirror() -> None:
    """Every loaded module of this package under `fla` too.

    What is found in `sys.modules` is not bound in its parent; for a package that rebinds the name of a submodule, such
    as `modules.conv`, that would be wrong.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("fla_npu."):
            sys.modules.setdefault(f"fla.{name.removeprefix('fla_npu.')}", module)


class _Installed:
    """What the finder and the loaders share."""

    def __init__(self, watched: Callable[[str], bool], imported: Callable[[ModuleType], None]) -> None:
        self.hiding = threading.local()
        self.roots = {name: _Root(name, self.hiding) for name in STAND_INS}
        self.watched, self.imported = watched, imported
        self.active = False
        self.aside: dict[str, ModuleType] = {}
        """Folders without modules that were imported by a name of the stand-ins, and what is below them."""

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

    def set_aside(self) -> None:
        """Make room in `sys.modules` where an import has found a folder without modules."""
        for root in self.roots:
            module = sys.modules.get(root)
            if module is not None and _is_bare_folder(module.__spec__):
                for name in [name for name in sys.modules if name == root or name.startswith(f"{root}.")]:
                    self.aside.setdefault(name, sys.modules.pop(name))

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
                if self.active:
                    self.set_aside()
                for name, module in taken.items() if self.active else ():
                    sys.modules.setdefault(name, module)


class _Finder(MetaPathFinder):
    """Answers `fla` and `causal_conv1d` where all others have no package, names below `fla` while that is this package,
    and watches imports. The first one: Python's own finder has an answer for every folder."""

    def __init__(self, installed: _Installed) -> None:
        self.installed = installed
        self.asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith("fla.") and self.installed.stands_in("fla"):
            return _twin_spec(fullname)
        root = self.installed.roots.get(fullname)
        asked = vars(self.asking).setdefault("names", set())
        if fullname in asked or (root is None and not self.installed.watched(fullname)):
            return None
        asked.add(fullname)  # of another finder that asks all others, too
        try:
            spec = _spec_from_others(self, fullname, path, target)
        finally:
            asked.discard(fullname)
        if root is not None:
            if getattr(self.installed.hiding, "on", False) or not (spec is None or _is_bare_folder(spec)):
                return spec
            return _root_spec(root)
        if spec is not None and spec.loader is not None:
            spec.loader = _WatchedLoader(spec.loader, self.installed)
        return spec


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


def _root_spec(root: _Root) -> ModuleSpec:
    spec = ModuleSpec(root.__name__, _RootLoader(root), origin=root._target, is_package=True)
    # Where there are modules below, for `pkgutil`; they are imported as twins.
    spec.submodule_search_locations = list(getattr(sys.modules.get(root._target), "__path__", ()))
    return spec


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
        self._finder = _Finder(self._installed)

    def install(self) -> None:
        with lock:
            _forget_answers()
            self._installed.active = True
            self._installed.set_aside()
            sys.meta_path.insert(0, self._finder)

    def remove(self) -> None:
        """Nothing of this is left in `sys.meta_path` and `sys.modules`; modules imported meanwhile stay usable."""
        with lock:
            self._installed.active = False
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            for name in self._installed.answered():
                sys.modules.pop(name, None)
            for name, module in self._installed.aside.items():
                sys.modules.setdefault(name, module)
            self._installed.aside.clear()
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
    # Up to 5.14, layers of Mamba and Falcon-Mamba look for causal_conv1d when they are built.
    kernels = getattr(sys.modules.get("transformers.integrations.hub_kernels"), "_KERNEL_MODULE_MAPPING", {})
    for name in [name for name, module in kernels.items() if isinstance(module, _Root)]:
        del kernels[name]


def _is_bare_folder(spec: ModuleSpec | None) -> bool:
    """Whether there is nothing to import: to Python, a folder without any module is a (namespace) package too."""
    return (
        spec is not None
        and (spec.loader is None or type(spec.loader).__name__.endswith("NamespaceLoader"))
        and not any(pkgutil.iter_modules(spec.submodule_search_locations))
    )


def installed_elsewhere(name: str) -> bool:
    """Whether a package of that name exists beside the stand-in."""
    if sys.modules.get(name) is not None:
        return not isinstance(sys.modules[name], _Root) and not _is_bare_folder(sys.modules[name].__spec__)
    specs = (finder.find_spec(name, None) for finder in list(sys.meta_path) if hasattr(finder, "find_spec"))
    return any(
        spec is not None and not isinstance(spec.loader, _RootLoader) and not _is_bare_folder(spec) for spec in specs
    )


def blocked(name: str) -> bool:
    """Whether somebody forbids the import of a name, by None in `sys.modules`."""
    return name in sys.modules and sys.modules[name] is None
