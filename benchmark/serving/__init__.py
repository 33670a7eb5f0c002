"""How long requests take while several models are served on one device (served_sets.py)."""
