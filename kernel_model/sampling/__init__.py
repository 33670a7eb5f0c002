"""Samples kernels of further shapes: near those of models, or near none."""
