"""All errors that compress raises on purpose, as one tree.

Catch `CompressError` to catch all of them; the command line prints the message and exits with 2. Indentation shows the
base class; each docstring says what is refused.

    CompressError
        RecipeError, ModelError, DataError, CheckpointError, RunError
        QuantizationError
            CalibrationError
                DeadTensorError
        SparsityError, SearchError, ReceptiveFieldError, RooflineError
        ExportError
            AuditError
        EngineError
            EngineUnavailableError

A message says what was got, what is allowed, and what to do. What is not refused and yet worth knowing in a loop of
one's own is a `CompressWarning`; the reports of runs say the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class CompressError(Exception):
    """Base of every error that compress raises on purpose.

    Examples:
        >>> try:
        ...     compress.load_recipe("quickstrat")
        ... except compress.CompressError as error:
        ...     print(type(error).__name__)
        RecipeError
    """


class CompressWarning(UserWarning):
    """A quantized network leaves something out that its float network does; the text says what, and what to do.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("ignore", compress.CompressWarning)
    """


class RecipeError(CompressError):
    """A recipe key, type, range or rule is not acceptable."""


class ModelError(CompressError):
    """A model cannot be made, loaded or traced."""


class DataError(CompressError):
    """A data set is missing, empty, unreadable or mislabelled."""


class CheckpointError(CompressError):
    """A checkpoint is truncated, foreign or belongs to another model."""


class RunError(CompressError):
    """A run folder holds something else than the requested run."""


class QuantizationError(CompressError):
    """A placement or a quantizer is not possible."""


class CalibrationError(QuantizationError):
    """Ranges are missing, NaN or zero."""


class DeadTensorError(CalibrationError):
    """Tensors were zero on every calibration image, though the weights allow other values, or held infinity.

    Attributes:
        quantizers: of these tensors.
    """

    def __init__(self, quantizers: Sequence[str], *, infinite: bool = False) -> None:
        found, way = "all collected values are zero, and a scale of zero cannot be", "images that reach this tensor"
        if infinite:
            found, way = "infinity was collected, of which there is no scale", "images and weights without it"
        super().__init__(
            f"{', '.join(quantizers)}: {found}: calibrate with {way}, or leave the layers that consume it float (rules "
            "with enable: false)"
        )
        self.quantizers, self.infinite = tuple(quantizers), infinite


class SparsityError(CompressError):
    """A mask or a pattern does not fit its weight."""


class SearchError(CompressError):
    """A search has nothing to choose from, or its bound cannot be met."""


class ReceptiveFieldError(CompressError):
    """A layer or a gradient has no receptive field."""


class RooflineError(CompressError):
    """A device is unknown, or lacks the requested precision."""


class ExportError(CompressError):
    """A model cannot become ONNX."""


class AuditError(ExportError):
    """An ONNX file or an engine is not as required."""


class EngineError(CompressError):
    """An engine fails to build or to run."""


class EngineUnavailableError(EngineError):
    """An engine is not installed or does not work on this machine; the message says what to install."""


_ABBREVIATIONS = {"trt": "tensorrt", "ort": "onnxruntime", "ov": "openvino", "rtx": "tensorrt-rtx"}
"""Engines and targets by the names that people use."""


def near_misses(got: str, allowed: Iterable[str], *, limit: int = 3) -> str:
    """Return ", did you mean 'a' or 'b'?" for a misspelt name, or "" when nothing is close.

    >>> near_misses("activatons", ["weights", "activations"])
    ", did you mean 'activations'?"
    >>> near_misses("ort", ["openvino", "onnxruntime"])
    ", did you mean 'onnxruntime'?"
    """
    names = list(allowed)
    short = _ABBREVIATIONS.get(got.lower())
    close = [short] if short in names else difflib.get_close_matches(got, names, n=limit, cutoff=0.6)
    return f", did you mean {' or '.join(repr(str(c)) for c in close)}?" if close else ""


def first_few(names: Iterable[str], limit: int = 5) -> str:
    """Return the first few names for a message, and the number of the others.

    >>> first_few(["a", "b", "c"], 2), first_few([])
    ('a, b and 1 more', 'none')
    """
    listed = list(names)
    shown = ", ".join(listed[:limit]) or "none"
    return f"{shown} and {len(listed) - limit} more" if len(listed) > limit else shown
