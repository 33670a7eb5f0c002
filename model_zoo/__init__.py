"""Exports models to analyse and measure as ONNX files."""
