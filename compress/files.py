"""Files written whole or not at all; JSON read within limits."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.errors import CompressError
from compress.support.limits import DEPTH, FILE_BYTES, JSON_BYTES

_PART = ".part"
_DEVICES = Path("/dev")
_NAMED = 50
"""Letters of a file's name that its temporary name repeats: file systems take 255 bytes."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress"


def path_of(given: Path | str) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise CompressError(f"a {type(given).__name__} was given where a path is wanted: name a file or folder")
    return Path(given)


def expand_user(path: Path | str) -> Path:
    """Resolve `~`; that of an unknown user stays."""
    try:
        return path_of(path).expanduser()
    except RuntimeError:
        return Path(path)


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed on success, removed on any error.

    `path` is the old file or the new one, never a part, also after a kill.

    Raises:
        OSError: `path` is a folder or a device, or writing or renaming fails; it names `path`.
    """
    path = path_of(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file", str(path))
    if path.parent.resolve() == _DEVICES or (path.exists() and not path.is_file()):
        # As root, a rename onto /dev/null or the link /dev/stdout would take it from the whole machine.
        raise OSError(errno.EINVAL, "it is a device or a pipe; name a file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path), _removed_after(path) as temporary:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)


@contextmanager
def _removed_after(path: Path) -> Iterator[Path]:
    for _ in range(100):
        temporary = path.parent / f".{path.name[:_NAMED]}.{secrets.token_hex(8)}{_PART}"
        try:  # with the usual permissions of this process, which mkstemp does not give
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0), 0o666))
            break
        except FileExistsError:
            continue
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors name `path` in the place of its temporary file, or of none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and (error.filename is None or str(error.filename).endswith(_PART)):
            error.filename, error.filename2 = str(path), None
        raise


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def write_text(path: Path | str, text: str) -> Path:
    """UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        # Names of files that are no UTF-8 hold surrogates: JSON takes the escape that they are written as.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return Path(path)


def write_bytes(path: Path | str, content: bytes) -> Path:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def write_json(path: Path | str, value: Any) -> Path:
    """Indented JSON, whole or not at all."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_regular(path: Path | str, most: int = FILE_BYTES) -> bytes:
    """The content of a file that may be hostile: a pipe would wait, a device never ends.

    Raises:
        OSError: missing, no regular file, or more bytes than `most`.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(
                errno.EINVAL, "it is a pipe, a device or a folder, and only regular files are read", str(path)
            )
        if about.st_size > most:
            raise OSError(errno.EFBIG, f"it has {about.st_size:,} bytes, and at most {most:,} are read", str(path))
        return file.read(about.st_size)  # no more: a read allocates what it is asked for


def read_json(path: Path | str) -> Any:
    """The content of a JSON file that may be damaged or hostile.

    Raises:
        OSError: the file cannot be read.
        ValueError: no regular file, too large, or no JSON; a text without the path.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    if (size := path.stat().st_size) > JSON_BYTES:
        raise ValueError(f"it has {size:,} bytes, and at most {JSON_BYTES:,} are read")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error}") from None
    return parse_json(text)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: no JSON, nested too deeply, or numbers of thousands of digits.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    level = [value]
    for _ in range(DEPTH):
        level = [inner for outer in level for inner in _parts(outer)]
        if not level:
            return value
    raise ValueError(f"nested more than {DEPTH} deep")


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
