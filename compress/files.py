"""Files that are whole or absent: written beside their place, then renamed into it."""

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

    A reader, or a process killed at any moment, sees the old file or the new one, never a part.

    Raises:
        OSError: from the caller's writing (disk full) or the rename; `path` is then as it was.
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
        temporary.chmod(0o666 & ~mask)  # mkstemp makes files private; a result is an ordinary file
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
