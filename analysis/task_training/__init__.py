"""Segmentation networks trained at full length, quantized and measured through recipes."""
