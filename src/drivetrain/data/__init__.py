"""Loaders divided over the data-parallel axis, with an order and a position that can be saved.

- ``division``: the index arithmetic
- ``order``: the order of an epoch
- ``rows``: which rows of a batch only repeat samples
- ``map_source``, ``iterable_source``, ``dispatch``: read batches
- ``stream``: chooses how a stream is read
- ``passes``: which pass over a loader has its position
- ``loader``: iterated by the training loop
- ``prepare``: puts all of these together
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
