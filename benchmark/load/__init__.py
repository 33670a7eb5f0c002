"""Work that keeps the device busy, and the probe that measures how long one waits for it."""
