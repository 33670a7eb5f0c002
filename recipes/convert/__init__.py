"""Converts files of older versions of Hase."""
