"""The strategy ``flat``: data parallelism with one all-reduce, after backward, of all gradients.

The simplest data parallelism that is right: nothing overlaps, but there is only one message per
dtype. It is a distribution of its own; the entry point in its pyproject.toml is all that connects
it to drivetrain, and the conformance tests of drivetrain run on it.

Bytes held: parameters, gradients and optimizer state, all whole on every rank.
Bytes sent per step and rank: 2 (N-1)/N of the gradients, and one byte-sized flag per parameter
that says whether it had a gradient, because one that had none on any rank must not be moved. After
each step rank 0 sends its buffers once.
"""

from drivetrain_flat.strategy import Flat, FlatConfig

__all__ = ["Flat", "FlatConfig"]
