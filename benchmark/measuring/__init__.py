"""Measures units of any kind on a device: the loop, the device's metrics, and what keeps times steady. It knows no kernels."""
