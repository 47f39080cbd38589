"""Caches lookups that torch's exporter repeats: they are most of the time that a small network's export takes.

torch.onnx reads the source of some 500 functions to build its table of ONNX functions, in each export; here it is built
once for each opset. Exports get copies, so that what one of them registers is not in the next one's. torch.export looks
up each operator that is composed of others 64 times (twice for each namespace of operators); here it does so once in an
export (torch 2.15).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.RLock()
_BUILT: dict[int | None, Any] = {}


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Let one `torch.onnx.export` take its tables from here while the context lasts; one thread at a time.

    A torch that keeps them elsewhere is left alone.
    """
    with _LOCK, table_built_once(), operators_named_once():
        yield


@contextmanager
def operators_named_once() -> Iterator[None]:
    """Let torch.export ask for its composite operators once while the context lasts."""
    try:
        from torch._export import utils  # optional: private, moves with torch

        named = utils.__dict__["_materialize_cpp_cia_ops"]
    except (ImportError, KeyError):
        yield
        return
    module: Any = utils
    module._materialize_cpp_cia_ops = functools.cache(named)
    try:
        yield
    finally:
        module._materialize_cpp_cia_ops = named


@contextmanager
def table_built_once() -> Iterator[None]:
    """Let `torch.onnx.export` take its table of ONNX functions from here while the context lasts."""
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

    registry: Any = ONNXRegistry
    registry.from_torchlib = staticmethod(copied)
    try:
        yield
    finally:
        registry.from_torchlib = build
