"""Serves several models at the same time on one device: sets, requests, results, and a model's server process."""
