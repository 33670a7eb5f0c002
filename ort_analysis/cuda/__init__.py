"""What a CUDA session makes of a graph, worked out where there is no GPU."""
