"""Figures of runs, whose layout and files are two fifths of a small run's time."""

from contextlib import contextmanager

import pytest

from compress.report import figures


@contextmanager
def quick_figures():
    # Figures are drawn, but neither laid out nor written, except in the context that this yields.
    quick = {
        "settle": lambda figure: figure,
        "to_png": lambda figure: b"",
        "to_inline_svg": lambda figure, key, label: f'<svg id="{key}"></svg>',
    }
    real = {name: getattr(figures, name) for name in quick}

    @contextmanager
    def whole():
        vars(figures).update(real)
        yield
        vars(figures).update(quick)

    vars(figures).update(quick)
    try:
        yield whole
    finally:
        vars(figures).update(real)


@pytest.fixture(scope="module", autouse=True)
def whole_figures():
    with quick_figures() as whole:
        yield whole
