"""Files of a search's measurements, by engine, version and machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from compress.measure.machine import describe_machine


def cache_path(engine: str, version: str, folder: Path | None, *, what: str = "") -> Path:
    """Return the file for an engine of a version on this machine; folder None = the user's."""
    machine = describe_machine()
    gpus = "-".join(gpu.name for gpu in machine.gpus) if engine.startswith(("cuda", "tensorrt")) else ""
    name = f"{what} {engine}-{version}-{machine.cpu}-{machine.usable_cores:g}-{gpus}"
    base = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress" / "search"
    return base / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.json"
