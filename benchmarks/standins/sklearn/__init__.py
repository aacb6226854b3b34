"""Stands in for ``sklearn``."""
