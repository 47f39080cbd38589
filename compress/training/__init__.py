"""The training loop, its checkpoints and processes."""
