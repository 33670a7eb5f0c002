"""Measures latencies of kernels and models, on an idle device and under load."""
