"""The measuring loop and what keeps it steady; knows no kernels and no models."""
