"""Writes files whole or not at all: under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is renamed to `path`, on any error removed.

    At any moment, also if the process is killed, `path` is the old file or the new one, never a part.

    Raises:
        OSError: writing (disk full) or renaming fails; `path` is then unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes private files; a result has the usual permissions
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> Path:
    """Write `text` as UTF-8, whole or not at all, and return the path."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def write_json(path: Path | str, value: Any) -> Path:
    """Write `value` as indented JSON, whole or not at all, and return the path."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
