"""Pages to look at: one HTML file each, which needs no network."""
