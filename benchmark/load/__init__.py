"""Work that keeps the device busy, and what a probe meets of it."""
