"""The dataset on disk: journal, header, tables."""
