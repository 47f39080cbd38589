"""Figures of runs are drawn without being laid out; see tests/figures.py."""

from tests.figures import whole_figures as whole_figures
