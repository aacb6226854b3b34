"""Activation recompute: blocks forget their intermediate values and compute them again in backward.

``full`` keeps a block's inputs (Chen et al. 2016, arXiv:1604.06174). ``selective`` also keeps the
results of the block's projections, and recomputes large and cheap results, above all attention's
core (Korthikanti et al. 2022, arXiv:2205.05198). The kept inputs may be moved to host memory, or
split over an axis whose ranks hold replicas of them, which is ZeRO-R's Pa (Rajbhandari et al. 2020,
arXiv:1910.02054, section 6.1).

- ``attach``: chooses modules, puts a recomputing forward into them, and takes it out again
- ``replay``: one call of a block that is computed again in backward, and its kept results
- ``inputs``: where the inputs wait, and their ways to host memory and back
"""

from drivetrain.recompute.attach import Mode, attach, choose_blocks, is_attached, restore
from drivetrain.recompute.inputs import KeptInputs

__all__ = ["KeptInputs", "Mode", "attach", "choose_blocks", "is_attached", "restore"]
