"""Predicts the memory of a model's session."""
