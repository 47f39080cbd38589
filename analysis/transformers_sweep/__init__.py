"""Networks of transformers through quantization, a training step, export and ONNX Runtime."""
