"""Predictions for a GPU that several processes share."""
