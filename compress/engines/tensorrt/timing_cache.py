"""Stores times of kernels between TensorRT builds: builds take seconds instead of minutes, and are repeatable.

The times belong to one version and one GPU, which the name of the file in the user's cache folder contains. The library
refuses a file of another version or GPU; then the build goes on without it and adds a note.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.engines.tensorrt.library import Library
from compress.errors import EngineError
from compress.files import replacing

if TYPE_CHECKING:
    import tensorrt


@dataclass(frozen=True, kw_only=True)
class TimingCache:
    """File that times are written to after the build."""

    path: Path


def default_cache_path(version: str, gpu: str) -> Path:
    """Return the file in the user's cache folder for a version and a GPU."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{version}-{gpu}").strip("-")
    return base / "compress" / f"tensorrt-{name}.timing"


def use_timing_cache(
    library: Library, config: tensorrt.IBuilderConfig, path: Path | None, *, gpu: str
) -> tuple[TimingCache | None, tuple[str, ...]]:
    """Give a builder's configuration the times that are stored.

    Args:
        library: runs the build.
        config: its `IBuilderConfig`.
        path: file with the times; None = the default one.
        gpu: name of the GPU.

    Returns:
        The file to write the times to afterwards (None if the library has none), and notes: a cache of another version
        or GPU is neither used nor overwritten.

    Raises:
        EngineError: `path` is a folder.
    """
    if not library.flavour.timing_cache:
        return None, ()
    chosen = path or default_cache_path(library.version, gpu)
    if chosen.is_dir():
        raise EngineError(f"timing_cache {chosen} is a folder; name a file")
    held = chosen.read_bytes() if chosen.is_file() else b""
    cache = config.create_timing_cache(held)
    if cache is not None and config.set_timing_cache(cache, False):
        return TimingCache(path=chosen), ()
    config.set_timing_cache(config.create_timing_cache(b""), False)
    note = (
        f"timing cache {chosen} is of another version or GPU, or damaged, and was not used; delete it or name another"
    )
    return None, (note,)


def keep_timing_cache(cache: TimingCache, config: tensorrt.IBuilderConfig) -> None:
    """Write the times after a build."""
    with replacing(cache.path) as temporary:
        temporary.write_bytes(bytes(config.get_timing_cache().serialize()))
