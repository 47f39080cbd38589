"""Data sets whose batches depend on (seed, epoch, step) alone, and the preprocessing that is stored with a model."""
