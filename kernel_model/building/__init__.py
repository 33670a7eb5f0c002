"""Builds ONNX models of single kernels, and carriers of many."""
