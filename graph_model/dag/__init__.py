"""A model's graph of kernels and its longest path."""
