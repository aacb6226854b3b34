"""Dropout masks by counting (Salmon et al. 2011): a hash of a key and an element's global index.

Nothing is drawn, so a rank that holds a shard of a tensor computes the mask of its own elements and
gets the bits that one process would have there ("Parallel random numbers: as easy as 1, 2, 3").
Rows of the tensor get two 32 bit keys from the 64 bit finalizer of SplitMix (Steele et al. 2014);
elements of a row are hashed to 32 bits in two rounds of multiplication and xor with shifted bits,
one row key before each.

torch has signed integers only: multiplication wraps, shifts are followed by a mask.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain_megatron.tensor.partition import Partition

WORD = 1 << 64
_COLUMNS = 1 << 10
"""Trailing dims are hashed together up to so many elements, so that rows are not too short."""

_TILE = 1 << 15
"""Elements per thread that are hashed at once on the CPU: they stay in its cache."""

_GOLDEN64, _FIRST64, _SECOND64 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN32, _FIRST32, _SECOND32 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def mix(value: int) -> int:
    """Return a hash of 64 bits of the low 64 bits of a number."""
    value %= WORD
    value = (value ^ (value >> 30)) * _FIRST64 % WORD
    value = (value ^ (value >> 27)) * _SECOND64 % WORD
    return value ^ (value >> 31)


def combine(*values: int) -> int:
    """Return a hash of 64 bits of several numbers, in their order."""
    state = 0
    for value in values:
        state = mix(state + _GOLDEN64 + mix(value + _GOLDEN64))
    return state


def keep_mask(
    key: int,
    shape: Sequence[int],
    p: float,
    *,
    partition: Partition | None = None,
    rank: int = 0,
    device: torch.device | None = None,
) -> Tensor:
    """Return which elements of a tensor, or of this rank's share of the tensor, are kept.

    Args:
        key: 64 bits that stand for one call of dropout.
        shape: of this rank's tensor.
        p: probability of an element to be dropped, in steps of 2**-32.
        partition: the part of a dim on each rank; None for a whole tensor.
        rank: this one among the ranks of the partition.
        device: of the mask.

    Returns:
        Bools of that shape, true where kept.

    Raises:
        UsageError: the last dim has more than 2**32 elements.
    """
    if p <= 0.0 or p >= 1.0:
        return torch.full(tuple(shape), p <= 0.0, dtype=torch.bool, device=device)
    local, whole = list(shape) or [1], list(shape) or [1]
    indices = [torch.arange(size, device=device) for size in local]
    if partition is not None:
        whole[partition.dim] = partition.size
        ranges = [torch.arange(a, b, device=device) for a, b in partition.ranges[rank]]
        indices[partition.dim] = torch.cat(ranges) if ranges else indices[partition.dim]
    split = _split(whole)
    rows = _flat_index(indices[:split], whole[:split], device)
    columns = _flat_index(indices[split:], whole[split:], device)
    mask = torch.empty(len(rows), len(columns), dtype=torch.bool, device=device)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    terms = (columns * _GOLDEN32).to(torch.int32)
    tile = _tile_rows(mask)
    for start in range(0, len(rows), tile):
        hashes = _hashes(key, rows[start : start + tile], terms)
        torch.ge(hashes, threshold, out=mask[start : start + tile])
    return mask.view(tuple(shape))


def _split(whole: Sequence[int]) -> int:
    """Return how many leading dims count rows; the others are columns, 2**32 at most."""
    if whole[-1] > 2**32:
        raise UsageError(
            f"expected a last dim of at most 2**32 elements to drop some of, found {whole[-1]}; "
            "reshape the tensor to more dims before dropout"
        )
    extents = list(accumulate(reversed(whole), lambda a, b: a * b))
    dims = 1
    while dims < len(whole) and extents[dims - 1] < _COLUMNS and extents[dims] <= 2**32:
        dims += 1
    return len(whole) - dims


def _flat_index(
    indices: Sequence[Tensor], sizes: Sequence[int], device: torch.device | None
) -> Tensor:
    """Return the global flat index of each element, 1-D, int64, from those in each dim."""
    flat = torch.zeros(1, dtype=torch.int64, device=device)
    for index, size in zip(indices, sizes, strict=True):
        flat = (flat[:, None] * size + index).flatten()
    return flat


def _tile_rows(mask: Tensor) -> int:
    rows, columns = mask.shape
    if mask.device.type != "cpu":
        return max(rows, 1)
    return max(_TILE * torch.get_num_threads() // max(columns, 1), 1)


def _hashes(key: int, rows: Tensor, terms: Tensor) -> Tensor:
    """Return 32 bits for each element, shape (rows, columns); the highest are the best mixed."""
    keys = _row_keys(key, rows)
    first, second = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    hashes = terms ^ first[:, None]
    scratch = torch.empty_like(hashes)
    _fold(hashes, 16, scratch).mul_(_signed(_FIRST32, 32)).bitwise_xor_(second[:, None])
    return _fold(hashes, 15, scratch).mul_(_signed(_SECOND32, 32))


def _row_keys(key: int, rows: Tensor) -> Tensor:
    """Return 64 bits for each row."""
    state = rows * _signed(_GOLDEN64, 64) + _signed(key, 64)
    scratch = torch.empty_like(state)
    _fold(state, 30, scratch).mul_(_signed(_FIRST64, 64))
    _fold(state, 27, scratch).mul_(_signed(_SECOND64, 64))
    return _fold(state, 31, scratch)


def _fold(state: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """Xor numbers, in place, with themselves shifted to the right; zeros come in on the left."""
    width = 8 * state.element_size()
    torch.bitwise_right_shift(state, bits, out=scratch)
    return state.bitwise_xor_(scratch.bitwise_and_((1 << (width - bits)) - 1))


def _signed(value: int, bits: int) -> int:
    """Return the signed number with the same low bits."""
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value
