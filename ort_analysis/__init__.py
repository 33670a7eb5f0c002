"""Splits a model's optimised graph into kernels."""
