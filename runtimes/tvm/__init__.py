"""Apache TVM: its fused functions as kernels, searched schedules, and its worker process."""
