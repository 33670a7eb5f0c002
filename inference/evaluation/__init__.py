"""Compares predictions with measurements."""
