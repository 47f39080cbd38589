"""Where quantizers are placed in a graph, and why."""
