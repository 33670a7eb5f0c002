"""Phase 4: measured latencies of kernels and models, idle and under load."""
