"""Data sets whose batches depend on (seed, epoch, step) alone, and the preprocessing that travels with a model."""
