"""Measures under ONNX Runtime: sessions, profiles, carriers of many kernels, probes, and the worker process."""
