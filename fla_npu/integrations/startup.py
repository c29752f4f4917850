"""`fla_npu.enable()` for programs one cannot edit: a `.pth` file, which Python runs at every start of an environment.

It only puts a finder into the import system. The first import of a modeling file of transformers, of `fla` or of
`causal_conv1d` enables fla_npu; until then nothing is loaded, and where fla_npu is gone nothing happens at all.
"""

import inspect
import os
import sysconfig
import tempfile
from pathlib import Path

FILE_NAME = "fla_npu_enable.pth"


class EnableOnImport:
    """The finder. Its source is copied into the `.pth` file, so it uses nothing from outside."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        import sys

        parts = name.split(".")
        if name not in ("fla", "causal_conv1d") and not (
            len(parts) == 4 and parts[:2] == ["transformers", "models"] and parts[3].startswith("modeling_")
        ):
            return None
        try:
            sys.meta_path.remove(self)
        except ValueError:
            return None
        try:
            import fla_npu

            fla_npu.enable()
        except Exception as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name == "fla_npu"):
                import logging

                logging.getLogger("fla_npu").warning(f"fla_npu is not enabled: {type(error).__name__}: {error}")
        # This finder is gone and others may be new, so the search starts again.
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None


def pth_line() -> str:
    """What the file holds: one line, as `.pth` files want it."""
    source = inspect.getsource(EnableOnImport)
    # An environment may list a folder twice.
    there = "any(type(finder).__name__ == 'EnableOnImport' for finder in sys.meta_path)"
    return f"import sys; exec({source!r}); {there} or sys.meta_path.insert(0, EnableOnImport())\n"


def default_folder() -> Path:
    """Where this environment looks for `.pth` files."""
    return Path(sysconfig.get_path("purelib"))


def install(folder: Path) -> bool:
    """Write the file into `folder`, at once or not at all; False if it was there already.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    file, line = folder / FILE_NAME, pth_line()
    if file.exists() and file.read_bytes() == line.encode():
        return False
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".fla_npu_enable")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(line)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
    return True


def uninstall(folder: Path) -> bool:
    """Remove the file from `folder`; False if there was none.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        (folder / FILE_NAME).unlink()
    except FileNotFoundError:
        return False
    return True
