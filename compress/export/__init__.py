"""ONNX files with Q/DQ, and the names in them."""
