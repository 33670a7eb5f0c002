"""Analyses models in a child process."""

