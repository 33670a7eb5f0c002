"""A run as two tracks, host and GPU, alone or beside a co-runner."""
