"""Phase 2: the optimised graph of a model, taken apart into kernels."""
