"""A run of a model: as a graph of kernels, and as two tracks, host and GPU, alone or while a co-runner shares the GPU."""
