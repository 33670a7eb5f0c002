"""Small networks of each kind, with random weights, and their export to ONNX. Loads torch."""

from hase.recipes.kinds.networks import exporting, images, sequences, tables, transformers

__all__ = ["exporting", "images", "sequences", "tables", "transformers"]
