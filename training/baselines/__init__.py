"""What the predictors are compared with."""
