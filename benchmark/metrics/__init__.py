"""Metrics of a device, by DCGM's field names, whoever reads them."""
