"""Compares two results for the same images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import EngineError
from compress.graph.inputs import flat_tensors


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Comparison of two sets of logits.

    Attributes:
        agreement: share of images (of pixels, for segmentation) whose highest logit is of the same class, 0 to 1; None
            for outputs that decide for no class.
        sqnr_db: signal to quantization noise ratio of all logits as one tensor, in dB; inf if they are equal.
    """

    agreement: float | None
    sqnr_db: float
    max_abs_difference: float
    images: int


def compare_logits(reference: NDArray[Any] | None, logits: NDArray[Any] | None) -> Parity:
    """Compare two logits, both (N, C).

    Raises:
        EngineError: logits are missing, shapes differ, there is no image, or a value is NaN.
    """
    if reference is None or logits is None:
        raise EngineError("there are no logits to compare: measure the accuracy with keep_logits=True")
    _check(reference, logits)
    difference = np.abs(reference.astype(np.float64) - logits.astype(np.float64))
    return Parity(
        agreement=agreement(reference, logits),
        sqnr_db=sqnr_db(reference, logits),
        max_abs_difference=float(difference.max()),
        images=len(reference),
    )


def compare_batches(
    reference: Sequence[Any], outputs: Sequence[Any], *, classes: Callable[[Any], Any] | None = None
) -> Parity:
    """Compare outputs of any form, tensors or structures of tensors, all batches together.

    `classes` returns the decided classes of a batch's outputs; None = no agreement is counted.

    Raises:
        EngineError: nothing to compare, or shapes that differ.
    """
    if not reference or len(reference) != len(outputs):
        raise EngineError(f"there are outputs of {len(reference)} and {len(outputs)} batches to compare")
    signal = noise = largest = 0.0
    same = places = images = 0
    for expected, got in zip(reference, outputs, strict=True):
        pairs = list(zip(flat_tensors(expected), flat_tensors(got), strict=True))
        for a, b in pairs:
            if a.shape != b.shape:
                raise EngineError(f"cannot compare shapes {tuple(a.shape)} and {tuple(b.shape)}: they must be equal")
            difference = a.double() - b.double()
            signal += a.double().square().sum().item()
            noise += difference.square().sum().item()
            largest = max(largest, difference.abs().max().item())
        images += len(pairs[0][0])
        if classes is not None:
            equal = classes(expected) == classes(got)
            same, places = same + int(equal.sum()), places + equal.numel()
    return Parity(
        agreement=same / places if places else None,
        sqnr_db=_decibel(signal, noise),
        max_abs_difference=largest,
        images=images,
    )


def agreement(reference: NDArray[Any], logits: NDArray[Any]) -> float:
    """The share of rows whose largest element, the first of equal ones, is in the same column; both (N, C).

    Raises:
        EngineError: shapes differ, or there is nothing to compare.
    """
    _check(reference, logits)
    if reference.ndim != 2:
        raise EngineError(f"agreement compares logits (images, classes), got shape {reference.shape}")
    return float(np.mean(reference.argmax(axis=1) == logits.argmax(axis=1)))


def sqnr_db(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """10 log10(sum reference^2 / sum (reference - value)^2) in dB; inf if equal, -inf if only the reference is zero.

    Raises:
        EngineError: shapes differ, there is nothing to compare, or a value is NaN.
    """
    _check(reference, value)
    signal = float(np.square(reference.astype(np.float64)).sum())
    noise = float(np.square(reference.astype(np.float64) - value.astype(np.float64)).sum())
    return _decibel(signal, noise)


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    # A difference of logarithms: the quotient itself may overflow or vanish.
    return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf


def _check(reference: NDArray[Any], value: NDArray[Any]) -> None:
    if reference.shape != value.shape:
        raise EngineError(f"cannot compare shapes {reference.shape} and {value.shape}: they must be equal")
    if not reference.size:
        raise EngineError(f"there is nothing to compare: the shape is {reference.shape}")
    for name, array in (("reference", reference), ("value", value)):
        if not np.isfinite(array).all():
            raise EngineError(f"the {name} holds NaN or infinite numbers, so a comparison says nothing")
