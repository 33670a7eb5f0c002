"""How a runtime opens, runs and profiles a model: a folder for each."""
