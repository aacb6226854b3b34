"""What tests of layers over emulated ranks share: numbers, comparisons, and counted collectives."""

import torch


def numbers(*shape, seed=0):
    """Return random numbers in fp64, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def calls(ranks):
    """Return how often each collective was called."""
    return {operation: entry.calls for (_, operation), entry in ranks.traffic.entries().items()}
