"""Signal to noise and agreement: closed forms, scikit-learn, and the extremes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import accuracy_score

from compress.errors import EngineError
from compress.measure.parity import agreement, compare_logits, sqnr_db

FLOATS = hnp.arrays(np.float32, (6, 4), elements=st.floats(-1e3, 1e3, width=32))


@given(FLOATS.filter(lambda a: np.abs(a).max() > 1e-3), st.floats(1e-4, 1e4))
def test_noise_of_a_known_share_of_the_signal(reference, share):
    reference = reference.astype(np.float64)
    expected = -20 * math.log10(share)
    assert sqnr_db(reference, reference * (1 + share)) == pytest.approx(expected, abs=1e-5)


@given(FLOATS, FLOATS)
def test_the_definition(reference, value):
    noise = ((reference.astype(float) - value.astype(float)) ** 2).sum()
    signal = (reference.astype(float) ** 2).sum()
    if noise and signal:
        assert sqnr_db(reference, value) == pytest.approx(10 * np.log10(signal / noise), abs=1e-9)
    else:
        assert sqnr_db(reference, value) == (math.inf if not noise else -math.inf)


def test_uniform_quantization_gives_six_db_a_bit():
    # A sine over the full range, rounded to n bits: 6.02 n + 1.76 dB (Bennett, 1948).
    signal = np.sin(np.linspace(0, 1000, 200_001))
    for bits in (8, 10, 12):
        step = 2 / 2**bits
        assert sqnr_db(signal, np.round(signal / step) * step) == pytest.approx(6.02 * bits + 1.76, abs=0.1)


def test_extremes():
    x = np.ones((2, 3), np.float32)
    assert sqnr_db(x, x) == math.inf
    assert sqnr_db(np.zeros_like(x), x) == -math.inf
    assert sqnr_db(np.zeros_like(x), np.zeros_like(x)) == math.inf
    assert sqnr_db(x * np.float32(1e30), x * np.float32(1.1e30)) == pytest.approx(20, abs=1e-3)


@given(FLOATS, FLOATS)
def test_agreement_is_the_accuracy_of_one_against_the_other(reference, logits):
    assert agreement(reference, logits) == accuracy_score(reference.argmax(1), logits.argmax(1))
    seen = compare_logits(reference, logits)
    assert seen.agreement == agreement(reference, logits)
    assert seen.sqnr_db == sqnr_db(reference, logits)
    assert seen.max_abs_difference == np.abs(reference.astype(float) - logits.astype(float)).max()
    assert seen.images == 6


def test_refusals():
    x = np.ones((2, 3), np.float32)
    for reference, value, message in (
        (x, x[:1], "shapes"),
        (x[:0], x[:0], "nothing to compare"),
        (x, np.full_like(x, np.nan), "the value holds NaN"),
        (np.full_like(x, np.inf), x, "the reference holds NaN"),
        (None, x, "keep_logits=True"),
        (x, None, "keep_logits=True"),
    ):
        with pytest.raises(EngineError, match=message):
            compare_logits(reference, value)
    with pytest.raises(EngineError, match="logits \\(images, classes\\)"):
        agreement(x[0], x[0])
