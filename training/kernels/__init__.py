"""What predicts a kernel's time."""
