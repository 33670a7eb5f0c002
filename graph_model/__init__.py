"""The graph of a model's kernels, and the time of a run as a pure function of graph and kernel times."""
