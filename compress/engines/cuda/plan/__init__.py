"""From an ONNX file to a plan: typed steps over tensors whose place in memory is known."""
