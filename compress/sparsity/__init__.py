"""Sparsity: n:m and unstructured masks, channel permutation, channel pruning; through training to a plain model."""
