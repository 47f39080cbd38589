"""An engine for ONNX files with Q/DQ nodes on NVIDIA GPUs: an integer plan, Triton kernels, CUDA graphs."""
