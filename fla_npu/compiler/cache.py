"""Results of the vendor's compiler on disk: one file per input, written so that two processes may do it at once."""

import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from fla_npu import settings
from fla_npu.compiler.bishengir import Outcome

_FORMAT = "3"


def key(ttir: str, linalg: str, binary: str, target: str, flags: Sequence[str], version: str) -> str:
    """Name of a result: everything that the result depends on, constants and called functions by the lowered text.

    The source lines that reports name are taken from the Triton IR: the front end gives a few operations of the Linalg
    text one or another of two locations, by chance.
    """
    lines = (line for line in linalg.splitlines() if not line.startswith("#loc"))
    bare = re.sub(r" loc\([^()]*\)", "", "\n".join(lines))
    parts = [_FORMAT, version, binary, target, *flags, ttir, bare]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _path(name: str) -> Path:
    return settings.cache_dir() / "compiler" / f"{name}.json.gz"


def load(name: str) -> Outcome | None:
    """The stored result, None when there is none or its file is damaged."""
    try:
        return Outcome.from_dict(json.loads(gzip.decompress(_path(name).read_bytes())))
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
        return None


def store(name: str, outcome: Outcome) -> None:
    """Keeps a result. A timeout says nothing about the input and is not kept."""
    if outcome.verdict == "timeout":
        return
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = gzip.compress(json.dumps(outcome.as_dict()).encode(), compresslevel=5)
    # Readers see the old file or the new one, never half of one.
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
