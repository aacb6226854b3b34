"""Words of a vocabulary that is cut over ranks: their ranks, and whether they exist."""

import torch
from torch import Tensor

from drivetrain.errors import ConfigError, UsageError
from drivetrain_megatron.tensor.partition import Partition


def is_simple(partition: Partition) -> bool:
    """Whether the words are cut into at most one range per rank, in ascending order."""
    return partition.is_plain and all(len(ranges) <= 1 for ranges in partition.ranges)


def range_of(partition: Partition, rank: int) -> tuple[int, int]:
    """Return a rank's half-open range of words; equal numbers for a rank without words.

    Raises:
        ConfigError: the words are not cut into one range per rank, in ascending order.
    """
    if not is_simple(partition):
        raise ConfigError(
            f"expected a vocabulary that is cut into one range per rank, found {partition.ranges}"
        )
    return partition.bounds[rank]


def here(words: Tensor, partition: Partition, rank: int) -> tuple[Tensor, Tensor]:
    """Return the local index of each word, 0 for words of other ranks, and a mask of these.

    Args:
        words: global indices, of any integer dtype.
        partition: how the vocabulary is cut.
        rank: whose words are local.
    """
    start, stop = range_of(partition, rank)
    elsewhere = (words < start) | (words >= stop)
    return (words - start).masked_fill(elsewhere, 0), elsewhere


def check(words: Tensor, size: int, what: str) -> None:
    """Let words that do not exist raise, which no rank would miss otherwise.

    Raises:
        UsageError: a word is negative, or too large. On an accelerator the device reports it.
    """
    if words.numel() == 0:
        return
    low, high = words.aminmax()
    if words.device.type != "cpu":
        torch._assert_async((low >= 0) & (high < size), f"{what} must be from 0 to {size - 1}")
    elif low < 0 or high >= size:
        raise UsageError(
            f"expected {what} from 0 to {size - 1}, found some from {int(low)} to {int(high)}; "
            "check the tokenizer against the size of the model's vocabulary"
        )
