"""Language models: their files, the runs of a request, and predictions for requests."""
