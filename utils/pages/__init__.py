"""Writes answers as pages: one HTML file each, which needs no network."""
