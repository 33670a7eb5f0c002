"""Predictors of kernel times."""
