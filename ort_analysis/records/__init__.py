"""The record of a model: its kernels, their costs, and the order in which its nodes run."""
