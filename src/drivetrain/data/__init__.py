"""Loaders divided over the data-parallel axis, with an order and a position that can be saved.

- ``division``: the order of an epoch, and the part of it that each rank gets
- ``sources``, ``streams``: read batches, of datasets with and without indices
- ``loader``: iterated by the training loop; its passes and positions
- ``examples``: small batches for a look at a model
- ``prepare``: puts all of these together
"""

from drivetrain.data.division import SeedableRandomSampler as SeedableRandomSampler
from drivetrain.data.loader import Delivery as Delivery
from drivetrain.data.loader import PreparedLoader as PreparedLoader
from drivetrain.data.loader import prepare_data_loader as prepare_data_loader
from drivetrain.data.loader import skip_first_batches as skip_first_batches
