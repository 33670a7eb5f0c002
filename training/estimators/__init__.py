"""The estimators that come with Hase besides `KernelModel` (learned/kernels/estimators.py).

A file here that defines an `Estimator` is found without any other change.
"""
