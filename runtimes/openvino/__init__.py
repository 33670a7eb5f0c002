"""OpenVINO on a CPU."""
