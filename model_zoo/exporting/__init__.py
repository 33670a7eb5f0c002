"""Exports torch models as ONNX files."""
