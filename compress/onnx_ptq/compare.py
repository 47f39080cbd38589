"""Comparison of a rewritten float graph with the user's own file: both give the same results for one picture."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from compress.engines.base import Arrays
from compress.errors import QuantizationError
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.passes import one_image
from compress.onnx_ptq.run import FloatSession, known_results
from compress.support.process import core_count

_CHANGED, _CHANGED_IN_HALF = 1e-3, 1e-2
"""Largest change of an output, relative to its largest value, that a rewriting of the float graph may make."""

_ROUNDING = 1e-6
"""Change that rounding alone may make, of probabilities near zero for example."""


def comparison(original: SourceFile, feed: Arrays) -> Callable[[Arrays], None]:
    """Return a function that refuses other results than the file's own, which are computed beside the caller's work.

    Args:
        original: the user's file.
        feed: a batch; its second picture is computed, which shows a change as well as all of them.

    Returns:
        Function of the results of the rewritten graph for the same picture (`results_for_one`). It raises
        QuantizationError, which names the output, for results that are not the same.
    """
    pool = ThreadPoolExecutor(1)
    before = pool.submit(results_for_one, original, feed)
    pool.shutdown(wait=False)
    return partial(_check_same, original, before)


def results_for_one(source: SourceFile, feed: Arrays) -> Arrays:
    """Return the outputs of a graph for one picture of a batch, or for the batch where its size is fixed."""
    alone, names = one_image(source.proto, feed), known_results(source.proto.graph)
    return FloatSession(source, names, threads=max(1, core_count() // 2)).run(feed if alone is None else alone)


def _check_same(original: SourceFile, before: Future[Arrays], after: Arrays) -> None:
    for name, expected in before.result().items():
        a, b = (np.asarray(value) for value in (expected, after[name]))
        if a.dtype.kind != "f" or a.size == 0:
            continue
        largest = float(np.abs(a.astype(np.float64)).max())
        change = float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) if a.shape == b.shape else np.inf
        limit = _CHANGED if a.dtype.itemsize > 2 else _CHANGED_IN_HALF
        if not change <= limit * largest + _ROUNDING:
            raise QuantizationError(
                f"{original.path}: folding and raising the opset changed the output {name!r} by {change:.3g}, and its "
                f"largest value is {largest:.3g}; at most {limit:g} of it is allowed. Export the file again with opset "
                "13 or later and BatchNorm folded"
            )
