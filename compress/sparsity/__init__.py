"""Sparsity: n:m and unstructured masks, channel permutation, channel pruning; through training to a plain model.

masks (pure) < saliency, permutation (mathematics of a matrix) < channels, groups (of a graph) < eligibility,
parametrization, permute < sparsifier, schedule, channel.
"""
