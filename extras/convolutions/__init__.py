"""Measures the convolutions of a model under one forced algorithm, with proof of which kernels ran."""
