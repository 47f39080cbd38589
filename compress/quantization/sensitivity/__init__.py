"""Sensitivity of each layer to quantization, and mixed precision."""
