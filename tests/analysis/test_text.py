"""Truth and scores of the study on text: a decoded line is the one that was coded."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.text.lines import HEIGHT, WIDTH, decode, lines


@given(codes=st.lists(st.integers(1, 5), max_size=10), repeats=st.lists(st.integers(1, 3), min_size=10, max_size=10))
def test_a_best_path_is_decoded(codes, repeats):
    """Each code some times in a row and a blank after it, as a network may say it."""
    path = [part for code, count in zip(codes, repeats, strict=False) for part in [*[code] * count, 0]]
    assert decode(np.eye(6)[path].reshape(-1, 6), "abcde") == "".join("abcde"[code - 1] for code in codes)


def test_lines_are_drawn_alike_each_time():
    fonts = Path("/usr/share/fonts")
    if not list(fonts.rglob("Noto*CJK-*.ttc")) or not list(fonts.rglob("DejaVuSans*.ttf")):
        pytest.skip("needs Debian's fonts-dejavu-core and fonts-noto-cjk")
    first, second = (lines(8, seed=3, fonts=fonts) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.text == b.text and np.array_equal(a.image, b.image)
        assert a.image.shape[:2] == (3, HEIGHT) and a.image.shape[2] >= WIDTH and np.ptp(a.image) > 0.5
