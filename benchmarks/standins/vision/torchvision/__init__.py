"""Stands in for ``torchvision``."""
