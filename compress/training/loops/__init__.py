"""Quantization-aware training within other people's loops."""
