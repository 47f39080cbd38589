"""Post-training quantization: from a float model to a calibrated one, and its improvement without training."""
