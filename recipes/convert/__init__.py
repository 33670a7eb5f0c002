"""Rewrites files of an older Hase as this one reads them."""
