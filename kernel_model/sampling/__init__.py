"""Draws further kernels: near those of models, and freely."""
