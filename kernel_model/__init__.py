"""Phase 3: each kernel as an ONNX model."""
