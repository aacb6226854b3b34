"""Loaders divided over the data-parallel axis, with an order and a position that can be saved.

- ``division``: the order of an epoch, and the part of it that each rank gets
- ``sources``, ``streams``: read batches, of datasets with and without indices
- ``loader``: iterated by the training loop; its passes and positions
- ``examples``: small batches for a look at a model
- ``prepare``: puts all of these together
"""

from drivetrain.data.division import SeedableRandomSampler
from drivetrain.data.loader import (
    Delivery,
    PreparedLoader,
    prepare_data_loader,
    skip_first_batches,
)

__all__ = [
    "Delivery",
    "PreparedLoader",
    "SeedableRandomSampler",
    "prepare_data_loader",
    "skip_first_batches",
]
