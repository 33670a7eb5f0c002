"""Measured latencies of kernels and models, idle and under load."""
