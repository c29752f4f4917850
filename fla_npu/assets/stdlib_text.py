"""Text that every Python installation carries: the sources of its standard library and the topics of `help()`.

The embedded models are trained on it, and it is the default prompt. Its licence, PSF-2.0, allows redistribution and
derived works; nothing is downloaded, and no copy of the text is shipped, since the interpreter that runs this has it.
About one document in twenty is held out of training, chosen by a hash of its name so that the choice is the same on
every machine and does not move when files are added.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    # Installed packages (other licences), tests, character tables, generated build facts, and legacy grammars.
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "idlelib", "lib2to3", "turtledemo"]
)
HELD_OUT_ONE_IN = 20


def documents(held_out: bool) -> Iterator[tuple[str, bytes]]:
    """(name, UTF-8 text) of each document of one side of the split, in the order of names.

    A document is a source file, named by its path below the standard library, or a `help()` topic, named
    `pydoc_data/topics.py:<topic>`. Yields nothing where the interpreter has no source files.
    """
    yield from sorted([*_source_files(held_out), *_help_topics(held_out)])


def is_held_out(name: str) -> bool:
    """Whether the document is kept for validation and prompts."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def held_out_text(num_bytes: int) -> bytes:
    """The first `num_bytes` bytes of the held-out documents, joined by blank lines (fewer if there are not as many)."""
    pieces: list[bytes] = []
    total = 0
    for _, text in documents(held_out=True):
        if total >= num_bytes:
            break
        pieces.append(text)
        total += len(text) + 2
    return b"\n\n".join(pieces)[:num_bytes]


def _source_files(held_out: bool) -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        folders = relative.parts[:-1]
        generated = relative.name.startswith("_sysconfigdata") or relative.as_posix() == "pydoc_data/topics.py"
        if generated or any(folder in SKIPPED_FOLDERS or folder.startswith("config-") for folder in folders):
            continue
        if is_held_out(relative.as_posix()) != held_out:
            continue
        try:
            yield relative.as_posix(), path.read_text(encoding="utf-8").encode()
        except (OSError, UnicodeDecodeError):
            # One unreadable or oddly encoded file must not stop a demo; the other files are as good.
            continue


def _help_topics(held_out: bool) -> Iterator[tuple[str, bytes]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for topic, text in topics.items():
        name = f"pydoc_data/topics.py:{topic}"
        if is_held_out(name) == held_out:
            yield name, text.encode()
