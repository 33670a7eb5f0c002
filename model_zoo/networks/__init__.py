"""The networks of each collection, with random weights."""
