"""Sums of the blocks of a file, in memory: a block that the disk gives back changed is noticed.

The sum of a block is that of its words of 64 bits, modulo 2^64, which takes a small part of the
time of a transfer. Each change within one word is seen, and a block of other bytes but for one
chance in 2^64; words that have changed places are not.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from drivetrain_offload.buffers import ALIGNMENT

WORDS = ALIGNMENT // 8


class BlockSums:
    """The sums of a file's blocks; threads may share them. New blocks are zeros."""

    def __init__(self) -> None:
        self._sums: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._changes = threading.Lock()

    def grow(self, nbytes: int) -> None:
        """Add the blocks up to the file's new length."""
        with self._changes:
            more = np.zeros(nbytes // ALIGNMENT - len(self._sums), np.uint64)
            self._sums = np.concatenate([self._sums, more])

    def keep(self, offset: int, blocks: memoryview) -> None:
        """Note the sums of whole blocks that are about to be written at an offset."""
        found, first = sums_of(blocks), offset // ALIGNMENT
        with self._changes:
            self._sums[first : first + len(found)] = found

    def changed(self, offset: int, blocks: memoryview) -> int | None:
        """Return the offset of the first block that the disk has changed; None without any.

        Args:
            offset: of the first block in the file.
            blocks: whole blocks, as they were read.
        """
        found, first = sums_of(blocks), offset // ALIGNMENT
        with self._changes:
            (places,) = np.nonzero(self._sums[first : first + len(found)] != found)
        return offset + int(places[0]) * ALIGNMENT if len(places) else None


def sums_of(blocks: memoryview) -> NDArray[np.uint64]:
    """Return the sum of each block, (blocks,)."""
    words: NDArray[np.uint64] = np.frombuffer(blocks, np.uint64).reshape(-1, WORDS)
    sums: NDArray[np.uint64] = np.add.reduce(words, axis=1)
    return sums
