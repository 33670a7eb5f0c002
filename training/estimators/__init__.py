"""The estimators that come with Hase beside the predictors of a target (`KernelModel` in learned/kernels/estimators.py).

A file here that defines an `Estimator` is found without any other change.
"""
