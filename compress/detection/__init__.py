"""Detectors as a network and a float head."""
