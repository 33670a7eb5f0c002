"""Compares predictions with each other."""
