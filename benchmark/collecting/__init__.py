"""What the collector measures, in which order, and how it times it."""
