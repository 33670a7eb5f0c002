"""Phase 3: every kernel as an ONNX model of its own."""
