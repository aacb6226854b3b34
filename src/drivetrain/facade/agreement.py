"""Checks that all ranks mean the same thing, before a disagreement becomes a hang.

A digest of eight bytes is compared first; only ranks that disagree exchange the whole text.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.errors import RankMismatchError
from drivetrain.runtime.world import World


def agree(world: World, what: str, lines: Sequence[str]) -> None:
    """Raise on every rank when the ranks' lines differ.

    Args:
        world: all of its ranks must call this together.
        what: names the thing in the message, for example "the model GPT".
        lines: what this rank holds, one fact a line.

    Raises:
        RankMismatchError: names the first line that differs, with both versions.
    """
    if world.size == 1:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:8]
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(world.device)
    all_of_them = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(all_of_them, mine)
    if all(torch.equal(theirs, all_of_them[0]) for theirs in all_of_them):
        return
    texts: list[list[str]] = [[] for _ in range(world.size)]
    dist.all_gather_object(texts, list(lines))
    raise RankMismatchError(f"ranks disagree on {what}: {_first_difference(texts)}")


def model_facts(model: nn.Module) -> list[str]:
    """Return a line per parameter and buffer: name, shape, dtype, whether it trains."""
    return [
        f"parameter {name} {tuple(p.shape)} {p.dtype} trainable={p.requires_grad}"
        for name, p in model.named_parameters()
    ] + [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]


def _first_difference(texts: Sequence[Sequence[str]]) -> str:
    reference = texts[0]
    other = next(rank for rank, text in enumerate(texts) if text != reference)
    length = max(len(reference), len(texts[other]))
    for i in range(length):
        mine = reference[i] if i < len(reference) else "nothing"
        theirs = texts[other][i] if i < len(texts[other]) else "nothing"
        if mine != theirs:
            return (
                f"rank 0 has '{mine}', rank {other} has '{theirs}'; build the same on every rank "
                "(same code, same seed, same configuration)"
            )
    return "no single line differs"
