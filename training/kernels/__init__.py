"""Fits predictors of kernel times."""
