"""N:M masks, their parametrization, and the channel permutations that make room for them."""
