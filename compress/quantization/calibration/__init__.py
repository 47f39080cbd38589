"""Ranges of quantizers from calibration images."""
