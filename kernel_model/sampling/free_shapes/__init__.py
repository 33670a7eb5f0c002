"""Kernels of no model, one file for each class of operators."""
