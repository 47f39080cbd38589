"""Everything that compress refuses, as one tree.

Catch `CompressError` to catch all of it; the command line prints the message and exits with 2.

    CompressError
    |-- RecipeError            a recipe key, type, range or rule
    |-- ModelError             a model that cannot be made, loaded or traced
    |-- DataError              a data set that is missing, empty, unreadable or mislabelled
    |-- CheckpointError        a checkpoint that is truncated, foreign or of another model
    |-- RunError               a run folder that holds something else
    |-- QuantizationError      a placement or quantizer that cannot be
    |   `-- CalibrationError   ranges that are missing, NaN or zero
    |-- SparsityError          a mask or pattern that does not fit its weight
    |-- ReceptiveFieldError    a layer or gradient that has no receptive field
    |-- RooflineError          an unknown device, or a precision that it lacks
    |-- ExportError            a model that cannot become ONNX
    |   `-- AuditError         an ONNX file or engine that is not what was asked
    `-- EngineError            an engine that fails to build or run
        `-- EngineUnavailableError   an engine that is not there; says what to install

A message says what was got, what is allowed, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CompressError(Exception):
    """Base of every error that compress raises on purpose."""


class RecipeError(CompressError):
    """A recipe key, type, range or rule is not acceptable."""


class ModelError(CompressError):
    """A model cannot be made, loaded or traced."""


class DataError(CompressError):
    """A data set is missing, empty, unreadable or mislabelled."""


class CheckpointError(CompressError):
    """A checkpoint is truncated, foreign or belongs to another model."""


class RunError(CompressError):
    """A run folder holds something other than what is asked."""


class QuantizationError(CompressError):
    """A placement or a quantizer cannot be."""


class CalibrationError(QuantizationError):
    """Ranges are missing, NaN or zero."""


class SparsityError(CompressError):
    """A mask or a pattern does not fit its weight."""


class ReceptiveFieldError(CompressError):
    """A layer or a gradient has no receptive field."""


class RooflineError(CompressError):
    """A device is unknown, or lacks the precision asked."""


class ExportError(CompressError):
    """A model cannot become ONNX."""


class AuditError(ExportError):
    """An ONNX file or an engine is not what was asked."""


class EngineError(CompressError):
    """An engine fails to build or to run."""


class EngineUnavailableError(EngineError):
    """An engine is not installed or cannot work on this machine."""


def near_misses(got: str, allowed: Iterable[str], *, limit: int = 3) -> str:
    """Return ", did you mean 'a' or 'b'?" for a misspelt name, or "" when nothing is close.

    >>> near_misses("activatons", ["weights", "activations"])
    ", did you mean 'activations'?"
    """
    close = difflib.get_close_matches(got, list(allowed), n=limit, cutoff=0.6)
    return f", did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
