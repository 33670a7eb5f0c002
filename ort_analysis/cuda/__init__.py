"""Derives the graph that a CUDA session runs, on machines without a GPU."""
