"""Turns an ONNX file into the nodes that ONNX Runtime runs, with all shapes known."""
