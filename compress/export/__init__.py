"""ONNX with Q/DQ, and the audit of what is in it."""
