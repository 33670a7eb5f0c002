"""Predictions for a GPU that a co-runner shares."""
