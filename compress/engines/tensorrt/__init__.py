"""TensorRT 10 and 11 and TensorRT-RTX: engine files are built, checked and run."""
