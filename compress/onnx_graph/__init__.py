"""ONNX operators in the terms of torch, for every reader of ONNX files."""
