"""CUDA kernels, compiled at run time by NVRTC."""
