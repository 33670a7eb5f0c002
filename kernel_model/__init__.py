"""Every kernel as an ONNX model of its own."""
