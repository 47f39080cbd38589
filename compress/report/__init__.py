"""Figures, markdown and HTML of a run."""
