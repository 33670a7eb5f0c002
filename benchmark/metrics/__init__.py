"""Metrics of a device, from several sources, under DCGM's field names."""
