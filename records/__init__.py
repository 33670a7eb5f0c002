"""The contents of files: kernels, models, measurements, datasets. Writer and reader share one schema per kind of file."""
