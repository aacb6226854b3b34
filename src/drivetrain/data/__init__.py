"""Loaders divided over the data-parallel axis, with an order and a position that can be saved.

``division`` holds the index arithmetic, ``order`` the order of an epoch, ``map_source``,
``iterable_source`` and ``dispatch`` read batches, ``loader`` is what the training loop iterates,
and ``prepare`` puts them together.
"""

from drivetrain.data.loader import PreparedLoader
from drivetrain.data.order import SeedableRandomSampler
from drivetrain.data.prepare import prepare_data_loader, skip_first_batches

__all__ = [
    "PreparedLoader",
    "SeedableRandomSampler",
    "prepare_data_loader",
    "skip_first_batches",
]
