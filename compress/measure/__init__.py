"""Latency, accuracy and parity, measured on engines."""
