"""Language models: their files and dimensions, the runs that make up a request, and what a request takes."""
