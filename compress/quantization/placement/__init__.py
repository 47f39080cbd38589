"""Placement of quantizers in a graph, with a reason for each decision."""
