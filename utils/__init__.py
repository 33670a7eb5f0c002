"""Basic tools: files, configs, errors, logs, processes, model files, pages. They know nothing about kernels."""
