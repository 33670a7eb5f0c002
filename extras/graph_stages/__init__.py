"""Measures the seven stages of a GraphSAGE layer on the processing units of a machine, and plans where each should run."""
