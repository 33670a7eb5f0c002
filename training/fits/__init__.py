"""Fits by subject: data sheets, energy, generation of language models, sharing of a GPU."""
