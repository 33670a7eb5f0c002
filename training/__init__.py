"""What is learned for a target: kernel predictors, and how kernel times make a model's time."""
