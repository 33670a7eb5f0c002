"""Further shapes of kernels: drawn near those of models, and freely."""
