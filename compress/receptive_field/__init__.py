"""Receptive fields: theoretical (exact, from the graph) and effective (measured with gradients)."""
