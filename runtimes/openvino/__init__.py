"""Runs models with OpenVINO on a CPU."""
