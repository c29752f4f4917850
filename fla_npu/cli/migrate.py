"""`fla-npu migrate`: rewrite the imports of `fla` in Python sources to `fla_npu`.

Only import statements and uses of the names they bind are touched, at the places the standard library's parser gives:
a concrete-syntax library would be a compiled dependency for the replacement of one identifier. Names that fla_npu does
not have stay with `fla`.
"""

import ast
import contextlib
import difflib
import importlib
import importlib.util
import io
import os
import re
import stat
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click

OLD, NEW = "fla", "fla_npu"
F_STRINGS_HAVE_POSITIONS = sys.version_info >= (3, 12)


class Edit(NamedTuple):
    """`text` in place of the characters from `start` to `end`."""

    start: int
    end: int
    text: str


class Rewritten(NamedTuple):
    """A source after its edits, and remarks on what stayed: pairs of a line and a text."""

    source: str
    remarks: list[tuple[int, str]]


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file would change.")
@click.option("--diff", is_flag=True, help="Write nothing; print what would change.")
def migrate(paths: tuple[Path, ...], check: bool, diff: bool) -> None:
    """Change imports of fla to fla_npu in files, and in the .py and .pyi files of folders.

    Names that fla_npu does not have are kept and reported, which is no failure. In folders, links are not followed:
    what they lead to is changed where it is, if at all.

    \b
    Exits with
      0    done, or nothing to do
      1    with --check: a file would change
      2    wrong options or paths
      123  a file could not be read, parsed or written; the others are done
    """
    changed = kept = failed = 0
    for path in _sources(paths):
        try:
            before, encoding = _read(path)
            after, remarks = rewrite(before)
            if after != before and not (check or diff):
                _write(path, after.encode(encoding))
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError) as error:
            # Null characters, encodings of no text, and expressions too deep for the parser among them.
            click.echo(f"{path}: cannot be migrated: {str(error) or type(error).__name__}", err=True)
            failed += 1
            continue
        for line, remark in remarks:
            click.echo(f"{path}:{line}: {remark}", err=True)
        kept += len(remarks)
        if after == before:
            continue
        changed += 1
        if diff:
            click.echo(_diff(path, before, after), nl=False)
        else:
            click.echo(f"{'would rewrite' if check else 'rewrote'} {path}", err=True)
    verb = "would change" if check or diff else "changed"
    click.echo(f"{changed} files {verb}, {kept} places kept, {failed} files failed", err=True)
    raise SystemExit(123 if failed else int(check and changed > 0))


def rewrite(source: str) -> Rewritten:
    """`source` with its imports of `fla`, and the uses of a plain `import fla`, changed to `fla_npu`.

    Raises:
        SyntaxError: this Python cannot parse it.
    """
    return _Migration(source).run()


class _Migration:
    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        # As the parser counts lines: a form feed or a Unicode separator does not end one.
        self.lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", source)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.edits: list[Edit] = []
        self.remarks: list[tuple[int, str]] = []

    def run(self) -> Rewritten:
        plain: list[tuple[ast.Import, ast.alias]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_old(node.module):
                self._import_from(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if not _is_old(alias.name):
                        continue
                    if alias.asname is None:
                        plain.append((node, alias))
                    elif self._serves(node.lineno, alias.name, alias.asname):
                        self._replace_word(alias, NEW)
        if plain:
            self._plain_imports(plain)
        source = self.source
        for edit in sorted(self.edits, reverse=True):
            source = source[: edit.start] + edit.text + source[edit.end :]
        return Rewritten(source, sorted(self.remarks))

    def _plain_imports(self, imports: Sequence[tuple[ast.Import, ast.alias]]) -> None:
        """`import fla` and `import fla.ops`, which all bind `fla`: they and its uses change together or not at all."""
        served = [self._serves(node.lineno, alias.name, None) for node, alias in imports]
        if not all(served):
            return
        if not self._uses_serve(OLD, importlib.import_module(NEW), OLD):
            return
        uses = self._renameable_uses()
        for _, alias in imports:
            if uses is not None:
                self._replace_word(alias, NEW)
            else:
                whole = alias.name.replace(OLD, NEW, 1)
                binding = f"{NEW} as {OLD}"
                self._replace(alias, binding if whole == NEW else f"{whole}, {binding}")
        for use in uses or ():
            self._replace_word(use, NEW)

    def _renameable_uses(self) -> list[ast.Name] | None:
        """Where the name `fla` is used, or None where something else may mean or need that name."""
        uses = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id == OLD:
                if not isinstance(node.ctx, ast.Load):
                    return None
                uses.append(node)
            elif isinstance(node, ast.JoinedStr):
                inside = any(isinstance(part, ast.Name) and part.id == OLD for part in ast.walk(node))
                if inside and not F_STRINGS_HAVE_POSITIONS:
                    return None
            elif isinstance(node, ast.Constant):
                # An entry of `__all__`, an annotation, an argument of `patch`, or only a text: it cannot be told.
                if isinstance(node.value, str) and re.search(rf"^{OLD}$|\b{OLD}\.\w", node.value):
                    return None
            elif OLD in _other_bindings(node):
                return None
        return None if re.search(rf"#\s*type:.*\b{OLD}\.", self.source) else uses

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.names[0].name == "*":
            self.remarks.append((node.lineno, f"kept: what `from {module} import *` binds cannot be told"))
            return
        moved = [
            alias
            for alias in node.names
            if self._serves(alias.lineno, f"{module}.{alias.name}", alias.asname or alias.name)
        ]
        if not moved:
            return
        start, end = self._span(node)
        text = self.source[start:end]
        target = module.replace(OLD, NEW, 1)
        if len(moved) == len(node.names):
            self.edits.append(Edit(start, end, re.sub(rf"\b{OLD}\b", NEW, text, count=1)))
        elif any(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline)):
            names = ", ".join(alias.name for alias in moved)
            self.remarks.append((node.lineno, f"kept: {target} has {names}; split this, whose comments would get lost"))
        else:
            before = self.source[self.starts[node.lineno - 1] : start]
            newline = "\r\n" if "\r\n" in self.source else "\n"
            inner = f"{newline}{before}    " if "\n" in text and not before.strip() else None
            statements = [
                _from_statement(target, moved, inner),
                _from_statement(module, [alias for alias in node.names if alias not in moved], inner),
            ]
            self.edits.append(Edit(start, end, ("; " if before.strip() else newline + before).join(statements)))

    def _serves(self, line: int, name: str, bound: str | None) -> bool:
        """Whether fla_npu has what an import of `name` wants, and of a module all that is used under the name that it
        is `bound` to. Remarks on what is missing."""
        found, value = _lookup(name)
        if not found:
            self.remarks.append((line, f"kept: {NEW} has no {name.partition('.')[2]}"))
            return False
        return bound is None or not isinstance(value, ModuleType) or self._uses_serve(bound, value, name)

    def _uses_serve(self, bound: str, module: ModuleType, name: str) -> bool:
        missing: list[tuple[int, str]] = []
        for node in ast.walk(self.tree):
            chain = _chain(node)
            if not isinstance(node, ast.Attribute) or chain is None or chain[0] != bound:
                continue
            value: Any = module
            for depth, attribute in enumerate(chain[1:], start=1):
                found, value = _attribute(value, attribute)
                if not found:
                    wanted = ".".join([name, *chain[1 : depth + 1]])
                    missing.append((node.lineno, f"kept: {NEW} has no {wanted.partition('.')[2]}"))
                    break
                if not isinstance(value, ModuleType):
                    break
        self.remarks += [remark for remark in set(missing) if remark not in self.remarks]
        return not missing

    def _offset(self, line: int, column: int) -> int:
        """Index of a place that the parser gives as a line and a number of UTF-8 bytes."""
        text = self.lines[line - 1]
        return self.starts[line - 1] + len(text.encode()[:column].decode())

    def _span(self, node: Any) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _replace(self, node: Any, text: str) -> None:
        self.edits.append(Edit(*self._span(node), text))

    def _replace_word(self, node: Any, text: str) -> None:
        """The `fla` that a node starts with."""
        start, _ = self._span(node)
        if self.source[start : start + len(OLD)] != OLD:
            raise SyntaxError(f"line {node.lineno} spells {OLD} with other characters that mean the same")
        self.edits.append(Edit(start, start + len(OLD), text))


def _is_old(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == OLD


def _from_statement(module: str, names: Sequence[ast.alias], inner: str | None) -> str:
    """`from module import names`, in one line or with a name in each line that `inner` starts."""
    parts = [alias.name if alias.asname is None else f"{alias.name} as {alias.asname}" for alias in names]
    if inner is None:
        return f"from {module} import {', '.join(parts)}"
    return f"from {module} import ({''.join(f'{inner}{part},' for part in parts)}{inner[:-4]})"


def _other_bindings(node: ast.AST) -> tuple[str | None, ...]:
    """Names that a node binds other than through `ast.Name` or a plain import of `fla`."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return (node.name,)
    if isinstance(node, ast.MatchMapping):
        return (node.rest,)
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return tuple(node.names)
    if isinstance(node, ast.Import):
        return tuple(alias.asname for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return tuple(alias.asname or alias.name for alias in node.names)
    return ()


def _chain(node: ast.AST) -> list[str] | None:
    """`["a", "b", "c"]` of the expression `a.b.c`."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if names and isinstance(node, ast.Name) else None


def _lookup(name: str) -> tuple[bool, Any]:
    """Whether fla_npu has what `fla` calls `name`, and it."""
    value: Any = importlib.import_module(NEW)
    found = True
    for attribute in name.split(".")[1:]:
        found, value = _attribute(value, attribute)
        if not found:
            break
    return found, value


def _attribute(value: Any, name: str) -> tuple[bool, Any]:
    """Whether a value has an attribute, or a package a submodule, of that name, and it."""
    if not isinstance(value, ModuleType):
        return hasattr(value, name), getattr(value, name, None)
    if name in getattr(value, "__all__", ()):
        # What needs an extra that is not installed cannot be had here, but is there.
        with contextlib.suppress(Exception):
            return True, getattr(value, name)
        return True, None
    path = f"{value.__name__}.{name}"
    if (
        hasattr(value, "__path__")
        and importlib.util.find_spec(path) is not None
        and not callable(vars(value).get(name))
    ):
        try:
            return True, importlib.import_module(path)
        except ImportError:
            return True, None
    return hasattr(value, name), getattr(value, name, None)


def _sources(paths: Sequence[Path]) -> Iterator[Path]:
    """Files as they are given, and the Python files of folders, without links, hidden ones and virtual environments."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(
                name
                for name in folders
                if not name.startswith(".")
                and name != "__pycache__"
                and not (Path(folder, name, "pyvenv.cfg")).exists()
            )
            found = [Path(folder, name) for name in sorted(files) if name.endswith((".py", ".pyi"))]
            yield from (file for file in found if not file.is_symlink())


def _read(path: Path) -> tuple[str, str]:
    """A source with its line ends as they are, and its encoding."""
    if path.suffix == ".ipynb":
        raise ValueError("notebooks are not read, export it as a .py file")
    data = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def _write(path: Path, data: bytes) -> None:
    """Put new contents in the place of a file at once, with its permissions; a link stays a link.

    Raises:
        PermissionError: the file is read-only. It could be replaced where its folder is not, but is meant to stay.
    """
    path = path.resolve()
    if not path.stat().st_mode & stat.S_IWUSR:
        raise PermissionError("it is read-only")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, path.stat().st_mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _diff(path: Path, before: str, after: str) -> str:
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, fromfile=str(path), tofile=str(path)))
