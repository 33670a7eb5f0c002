"""A prediction beside a co-runner."""
