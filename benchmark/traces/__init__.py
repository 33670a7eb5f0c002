"""What the GPU did in a run, by CUPTI."""
