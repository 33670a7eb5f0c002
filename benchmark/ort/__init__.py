"""ONNX Runtime: the graph that it runs, its kernels as models of their own, and its worker process."""
