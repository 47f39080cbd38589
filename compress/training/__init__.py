"""One loop for the float baseline and for QAT, its checkpoints, and its processes."""
