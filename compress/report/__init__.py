"""The pages of a run and of the comparison of two."""
