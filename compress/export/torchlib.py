"""torch's table of ONNX functions, built once for each opset instead of once for each export.

torch.onnx reads the source of some 500 functions to build it, which is half of the time that the export of a small
network takes (torch 2.15). Exports get copies, so that what one of them registers is not in the next one's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.RLock()
_BUILT: dict[int | None, Any] = {}


@contextmanager
def table_built_once() -> Iterator[None]:
    """Let `torch.onnx.export` take its table from here while the context lasts; one thread at a time.

    A torch that builds the table elsewhere is left alone.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry  # optional: private, moves with torch

        build = ONNXRegistry.__dict__["from_torchlib"]
    except (ImportError, AttributeError, KeyError):
        yield
        return

    def copied(**options: Any) -> Any:
        key = options.get("opset_version")
        if key not in _BUILT:
            _BUILT[key] = build.__get__(None, ONNXRegistry)(**options)
        table = ONNXRegistry()
        table.__dict__.update(_BUILT[key].__dict__)
        table.functions = {target: list(rows) for target, rows in _BUILT[key].functions.items()}
        return table

    with _LOCK:
        registry: Any = ONNXRegistry
        registry.from_torchlib = staticmethod(copied)
        try:
            yield
        finally:
            registry.from_torchlib = build
