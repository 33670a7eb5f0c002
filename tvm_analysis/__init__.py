"""Models as Apache TVM sees them: operators before fusion, kernels after it."""
