"""Phase 1: models to analyse and to measure, as ONNX files."""
