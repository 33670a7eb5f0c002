"""Convolutions of a model under one forced algorithm: what runs, how long it takes, and what proves that it ran."""
