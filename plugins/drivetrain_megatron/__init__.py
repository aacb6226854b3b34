"""Megatron: tensor, sequence and pipeline parallelism for an unmodified model, over data parallelism.

``tensor/`` divides the layers of a block over the axis ``tp``, ``pipeline/`` divides the blocks over
the axis ``pp``. What is left on a rank, its cell, is trained by any data-parallel strategy on the
axis ``dp``, found by name.
"""
