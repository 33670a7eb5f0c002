"""Fits how a model's latency follows from the times of its kernels."""
