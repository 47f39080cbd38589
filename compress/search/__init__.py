"""Search over precision, 2:4 sparsity, width and depth under measured latency."""
