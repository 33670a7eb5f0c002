"""Builds the networks of each collection, with random weights."""
