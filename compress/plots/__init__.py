"""Each figure once, in one style."""
