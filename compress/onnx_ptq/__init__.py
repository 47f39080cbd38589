"""Post-training quantization of ONNX files: Q/DQ pairs are inserted into the file's own graph."""
