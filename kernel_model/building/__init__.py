"""A kernel, or many in a carrier, as an ONNX model."""
