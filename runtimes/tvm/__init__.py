"""Apache TVM: fused functions as kernels, schedule search, and the worker process."""
