"""Quantization-aware training within other people's loops: one cycle, and an adapter for each loop."""
