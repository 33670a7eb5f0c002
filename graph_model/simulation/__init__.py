"""A run as two tracks, host and GPU, alone or while a co-runner shares the GPU."""
