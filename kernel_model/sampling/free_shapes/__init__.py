"""Draws kernels of no model: a module per class of operators, and a table of what is drawn how often."""
