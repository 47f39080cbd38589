"""An ONNX graph, and its operators in the terms of torch, for every reader of ONNX files."""
