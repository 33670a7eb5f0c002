"""Collects a dataset: config, plans, and the processes and actors that measure."""
