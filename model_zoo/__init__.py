"""Models to analyse and to measure, as ONNX files."""
