"""How kernel times make a model's time."""
