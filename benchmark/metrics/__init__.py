"""Metrics of a device under DCGM's field names, from several sources."""
