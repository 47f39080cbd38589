"""Models of other quantization libraries."""
