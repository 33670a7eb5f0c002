"""How a torch model becomes an ONNX file."""
