"""The clocks of the ranks, compared by messages: how far one is ahead of rank 0's at most.

No message arrives before it was sent. In one all-gather, rank r gets rank 0's message after rank 0
sent it, and rank 0 gets r's. Both note when they began and when they had everything; so::

    r had everything - 0 began  >=  how far r's clock is ahead  >=  r began - 0 had everything

Some rounds of this narrow the bounds to about the time of the quickest all-gather.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from drivetrain.runtime.world import World

ROUNDS = 24
"""All-gathers of a comparison: they take a few milliseconds together."""


class ClockComparison(NamedTuple):
    """A rank's clock beside that of rank 0.

    Attributes:
        begun_ns: when the comparison ended, by the clock of rank 0; the same on all ranks.
        ahead_ns: how far this rank's clock is ahead; 0 where the bounds allow 0, as they do on the
            same host.
        accuracy_ns: the error of that at most, over all ranks.
    """

    begun_ns: int
    ahead_ns: int
    accuracy_ns: int


def compare_clocks(world: World, clock: Callable[[], int] = time.time_ns) -> ClockComparison:
    """Compare the clocks of all ranks. Collective.

    Args:
        world: the ranks.
        clock: reads this rank's clock, in nanoseconds.
    """
    if world.size == 1:
        return ClockComparison(clock(), 0, 0)
    rounds = torch.zeros(ROUNDS, 2, dtype=torch.int64, device=world.device)
    rows = [torch.zeros(2, dtype=torch.int64, device=world.device) for _ in range(world.size)]
    for index in range(ROUNDS):
        began = clock()
        dist.all_gather(rows, torch.tensor([began, 0], device=world.device))
        rows[0].tolist()  # on an accelerator, this waits for the messages
        rounds[index] = torch.tensor([began, clock()], device=world.device)
    every = [torch.zeros_like(rounds) for _ in range(world.size)]
    dist.all_gather(every, rounds)
    times = torch.stack(every).cpu()  # (rank, round, began or had everything)
    ends = times[:, :, 1] - times[0, :, 0]  # r had everything - 0 began
    starts = times[:, :, 0] - times[0, :, 1]
    ahead = [bounds(low, high) for low, high in zip(starts.max(1)[0], ends.min(1)[0], strict=True)]
    accuracy = max(error for _, error in ahead[1:])
    return ClockComparison(int(times[0, -1, 1]), ahead[world.rank][0], accuracy)


def bounds(low: torch.Tensor, high: torch.Tensor) -> tuple[int, int]:
    """Return the likely value between two bounds, and its error at most."""
    least, most = int(low), int(high)
    if least <= 0 <= most:
        return 0, max(-least, most)
    return (least + most) // 2, -(-(most - least) // 2)
