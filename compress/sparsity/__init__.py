"""Sparsity: n:m and unstructured masks, channel permutation, channel pruning; through training to a plain model.

From the ground up: masks; selection, saliency and permutation_search (of one matrix); channel_classes and groups (of
a graph); eligibility, parametrization and channel_permutation; sparsifier, schedule and channel_pruning.
"""
