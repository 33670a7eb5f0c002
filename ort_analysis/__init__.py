"""The optimised graph of a model, taken apart into kernels."""
