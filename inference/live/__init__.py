"""Live predictions that follow the load."""
