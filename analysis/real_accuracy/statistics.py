"""Figures of a quantized network beside its float one, paired over pictures, with bootstrap intervals."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Figures:
    """Accuracy in percent, difference to float in points, agreement with float's class in percent, SQNR in dB."""

    top1: Interval
    points: Interval
    agreement: Interval
    sqnr_db: Interval


def figures(expected: Tensor, logits: Tensor, targets: Tensor, *, seed: int = 0) -> Figures:
    """Compare logits (N, classes) with the float network's on the same pictures.

    Each resample draws N pictures with replacement and takes both networks' results on them (paired bootstrap, Efron
    and Tibshirani, An Introduction to the Bootstrap, chapter 13: percentile intervals).
    """
    right = (logits.argmax(1) == targets).double()
    gain = right - (expected.argmax(1) == targets).double()
    agree = (logits.argmax(1) == expected.argmax(1)).double()
    signal, noise = expected.double().square().sum(1), (logits - expected).double().square().sum(1)
    rows = torch.stack([right, gain, agree, signal, noise]).numpy()
    draws = np.random.default_rng(seed).integers(0, len(targets), (RESAMPLES, len(targets)))
    means = np.stack([row[draws].mean(1) for row in rows])

    def interval(value: float, samples: np.ndarray) -> Interval:
        low, high = np.percentile(samples, [2.5, 97.5])
        return Interval(float(value), float(low), float(high))

    def decibel(s: np.ndarray, n: np.ndarray) -> np.ndarray:
        return 10 * np.log10(np.maximum(s, 1e-300) / np.maximum(n, 1e-300))

    whole = rows.mean(1)
    found = [interval(100 * whole[i], 100 * means[i]) for i in range(3)]
    ratio = interval(float(decibel(whole[3], whole[4])), decibel(means[3], means[4]))
    return Figures(found[0], found[1], found[2], ratio)
