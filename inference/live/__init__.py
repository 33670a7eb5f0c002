"""Predictions that follow the load."""
