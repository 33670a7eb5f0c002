"""How a GPU is shared between processes."""
