"""Traces of the GPU's work in a run, by CUPTI."""
