"""The strategy ``flat``: data parallelism in buckets that are sent while backward goes on.

It is a distribution of its own; the entry point in its pyproject.toml is all that connects it to
drivetrain, and the conformance tests of drivetrain run on it.

Bytes held: parameters, gradients and optimizer state, all whole on every rank; gradients lie in the
buckets. Bytes sent per step and rank: 2 (N-1)/N of the buckets, whose tail says for each parameter
whether it had a gradient, because one that had none on any rank must not be moved. After each step
rank 0 sends its buffers once.
"""

from drivetrain_flat.strategy import Flat, FlatConfig

__all__ = ["Flat", "FlatConfig"]
