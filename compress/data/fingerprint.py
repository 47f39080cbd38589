"""The content of a split in a few bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import first_few

SAMPLE = 256
"""Files whose bytes are part of a fingerprint; of others name and size are."""

_READ_BYTES = 1 << 20  # of each of them, at most


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The content of a split.

    Attributes:
        labels: class names in order.
        content: SHA-256 of `Split.content`.
    """

    labels: tuple[str, ...]
    images: int
    content: str

    def digest(self) -> str:
        """Return sixteen hexadecimal digits of labels and content."""
        return digest_of([*self.labels, str(self.images), self.content])[:16]


def digest_of(parts: Iterable[bytes | str]) -> str:
    """SHA-256 of texts, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def file_parts(folder: Path, names: list[str]) -> Iterator[bytes | str]:
    """Yield names and sizes, and the first bytes of `SAMPLE` files, evenly spread; a missing file is empty."""
    step = max(1, len(names) // SAMPLE)
    for number, name in enumerate(names):
        path = folder / name
        yield name
        try:
            yield str(path.stat().st_size)
            if number % step == 0 and path.is_file():
                with path.open("rb") as file:
                    yield file.read(_READ_BYTES)
        except OSError:
            yield "unreadable"


def changed_data(there: Mapping[str, Mapping[str, Any]], here: Mapping[str, Fingerprint]) -> list[str]:
    """A line for each split of both sides that differs."""
    lines = []
    for name in here.keys() & there.keys():
        old, new = there[name], here[name]
        labels = tuple(old.get("labels", ()))
        if labels != new.labels:
            lines.append(f"the classes of {name} were {first_few(labels)}, and are {first_few(new.labels)}")
        elif old.get("images") != new.images:
            lines.append(f"{name} had {old.get('images')} images, and has {new.images}")
        elif old.get("content") != new.content:
            lines.append(f"the images of {name} were added, removed, renamed, exchanged or changed")
    return sorted(lines)
