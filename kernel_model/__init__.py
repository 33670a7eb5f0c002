"""Builds and samples kernels, each as its own ONNX model."""
