"""From an ONNX file to the nodes that ONNX Runtime runs, with every shape known."""
