"""How estimators of kernel times are added, checked and admitted (docs/estimators.md)."""
