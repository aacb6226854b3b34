"""Texts cross ranks as bytes, and never as pickles, so that reading a message runs no code.

torch's functions for objects send pickles, and whoever can write to a connection of a run could
then run code on every rank.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")
"""Named everywhere: a script may have set another default device."""


def gather_texts(
    text: str, size: int, *, group: dist.ProcessGroup | None = None, device: torch.device | None
) -> list[str]:
    """Return the texts of all ranks, on all ranks. Collective.

    Args:
        text: of this rank.
        size: number of ranks.
        group: of the ranks; None means all.
        device: from which the group can send; None: the host.
    """
    counts, sent = _padded(text, size, group, device)
    received = sent.new_empty(size, sent.numel())
    if sent.numel():
        dist.all_gather(list(received.unbind()), sent, group=group)
    return _texts_of(received, counts)


def collect_texts(
    text: str, size: int, *, group: dist.ProcessGroup | None = None, device: torch.device | None
) -> list[str]:
    """Return the texts of all ranks on global rank 0, and an empty list elsewhere. Collective.

    The arguments are those of ``gather_texts``.
    """
    counts, sent = _padded(text, size, group, device)
    is_first = dist.get_rank() == 0
    received = sent.new_empty(size if is_first else 0, sent.numel())
    if sent.numel():
        rows = list(received.unbind()) if is_first else None
        dist.gather(sent, rows, dst=0, group=group)
    return _texts_of(received, counts) if is_first else []


def share_text(
    text: str,
    source: int,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None,
) -> str:
    """Return the text of one rank, on all ranks. Collective.

    Args:
        text: of this rank; others than ``source`` may pass any.
        source: global rank whose text is taken.
        group: of the ranks; None means all.
        device: from which the group can send; None: the host.
    """
    device = device or CPU
    mine = _bytes_of(text if dist.get_rank() == source else "")
    length = torch.tensor([mine.numel()], dtype=torch.int64, device=device)
    dist.broadcast(length, src=source, group=group)
    sent = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    sent[: mine.numel()] = mine
    if sent.numel():
        dist.broadcast(sent, src=source, group=group)
    return _text_of(sent.cpu())


def _padded(
    text: str, size: int, group: dist.ProcessGroup | None, device: torch.device | None
) -> tuple[list[int], Tensor]:
    """Return the lengths of all ranks' texts, and the own one with zeros up to the longest."""
    device = device or CPU
    mine = _bytes_of(text)
    lengths = torch.zeros(size, 1, dtype=torch.int64, device=device)
    length = torch.tensor([mine.numel()], dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.unbind()), length, group=group)
    counts = [int(count) for count in lengths.flatten().tolist()]
    sent = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    sent[: mine.numel()] = mine
    return counts, sent


def _texts_of(rows: Tensor, counts: Sequence[int]) -> list[str]:
    return [_text_of(row[:count]) for row, count in zip(rows.cpu(), counts, strict=True)]


def _bytes_of(text: str) -> Tensor:
    data = bytearray(text.encode())
    if not data:
        return torch.zeros(0, dtype=torch.uint8, device=CPU)
    return torch.frombuffer(data, dtype=torch.uint8)


def _text_of(data: Tensor) -> str:
    memory = bytearray(data.numel())
    if memory:
        torch.frombuffer(memory, dtype=torch.uint8).copy_(data)
    return memory.decode()
