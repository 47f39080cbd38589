"""Latency, accuracy, parity and sizes, measured on engines."""
