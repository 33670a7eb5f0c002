"""Fits everything that predictions read (kernels, composition and more) and measures its errors (held_out.py)."""
