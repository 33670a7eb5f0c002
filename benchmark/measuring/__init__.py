"""Measures units of any kind on a device: blocks, the driver, GPU traces and quiet moments. It knows no kernels."""
