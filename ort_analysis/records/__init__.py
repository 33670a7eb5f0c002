"""What a model's record holds: kernels, what they cost, and in which order nodes run."""
