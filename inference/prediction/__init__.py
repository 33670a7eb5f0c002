"""From a model to its predicted latency: record, kernels, run, interval, answer."""
