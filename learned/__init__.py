"""What predictions read: features and predictors of kernels, composition, intervals, sharing, energy; and a target's files."""
