"""Triton kernels and how they are launched."""
