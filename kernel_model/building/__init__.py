"""ONNX models of one kernel, or of many kernels in a carrier."""
