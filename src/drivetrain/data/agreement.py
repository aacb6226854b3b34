"""Ranks agree on the order of an epoch: one seed from rank 0, one fingerprint on all."""

import torch
import torch.distributed as dist

from drivetrain.errors import RankMismatchError
from drivetrain.runtime import rng
from drivetrain.runtime.world import World


def seed_of_main(seed: int, world: World) -> int:
    """Return the seed that rank 0 passes; collective when there are other ranks."""
    if world.size == 1:
        return seed
    return int(rng.broadcast_from_main(torch.tensor(seed, device="cpu")).item())


def check_same_order(mine: int, world: World) -> None:
    """Compare the fingerprints of the order; collective when there are other ranks.

    Raises:
        RankMismatchError: on every rank, when they differ.
    """
    if world.size == 1:
        return
    device = torch.device("cpu") if "gloo" in world.backend else world.device
    found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world.size)]
    dist.all_gather(found, torch.tensor([mine], device=device))
    fingerprints = [int(one.item()) for one in found]
    if len(set(fingerprints)) > 1:
        shown = ", ".join(f"rank {rank}: {one:x}" for rank, one in enumerate(fingerprints))
        raise RankMismatchError(
            f"expected the sampler to give the same order on every rank, found {shown} (hash of "
            "the order); draw its random numbers from torch, random or numpy.random's global "
            "generators or from its own 'generator' attribute, which are seeded by the epoch, and "
            "do not let it depend on the rank: the loader divides the order over the ranks itself"
        )
