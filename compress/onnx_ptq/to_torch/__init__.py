"""ONNX files as torch networks."""
