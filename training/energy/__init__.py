"""What a run of a model takes of the device's energy."""
