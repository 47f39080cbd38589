"""Audits of ONNX files, and of the engines that are built from them."""
