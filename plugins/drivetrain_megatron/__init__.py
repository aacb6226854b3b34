"""Tensor, sequence and pipeline parallelism for unmodified models, around data parallelism."""
