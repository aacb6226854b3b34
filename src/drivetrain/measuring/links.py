"""Measures links: every pair of ranks, rings over hosts and inside of them, a disk.

A matrix of bandwidths shows the levels of the topology: where the rates of pairs differ by more
than a factor of two, the quick pairs belong together.
"""

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.collectives.communicator import Communicator
from drivetrain.collectives.facts import gather_facts
from drivetrain.measuring.clock import CACHES, Clock
from drivetrain.runtime.world import World

MICRO = 1e-6
SMALL, LARGE = 8, 4 * 2**20
"""Bytes of the messages of pairs: one for the latency, one for the rate."""

RINGS = (2**17, 2**20, 2**23, 2**25)
"""Bytes of each rank in the all-reduces of rings."""

SLOW_BYTES_PER_S = 50e6
"""Rate of pairs below which the longest rings are left out, to end in time."""

LAYERS = 4
"""Linear layers that are trained beside a ring."""

QUICK_BYTES_PER_S = 1e9
"""Rate of pairs from which rings run in rounds: slower ones take long, and scatter less."""

SHORT = 8
"""Short trainings in a row, each beside a ring of its own."""

MOST_STEPS = 100
"""Trainings beside a ring: a slow link is not waited for longer than these take."""

MOST_PAIRS = 66
"""Pairs that are measured: all of 12 ranks; of more, those with one rank per host and rank 0's."""

GAP = 2.0
"""Factor between two rates from which they are two levels."""

DISK = (10**5, 10**6, 32 * 10**6)


@dataclass(frozen=True, slots=True)
class RingFigures:
    """All-reduces over a line of ranks.

    Attributes:
        latency_us: of a message, however few steps its ring has.
        hop_us: of each step of a ring.
        gigabytes_per_second: the best rate of a rank.
        shares: (bytes of a rank, share of that rate).
        operations: how many times as long others take as half of an all-reduce.
    """

    latency_us: float
    hop_us: float
    gigabytes_per_second: float
    shares: list[tuple[float, float]]
    operations: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BesideFigures:
    """A collective beside training.

    Attributes:
        slowdown: seconds of compute lost per second beside it, at most 1.
        in_training: how many times its own time it costs, at least 1.
        in_training_us: of each collective more, however few its bytes are.
    """

    slowdown: float = 0.0
    in_training: float = 1.0
    in_training_us: float = 0.0


class _PairFigures(NamedTuple):
    """The figures of a link: its two ranks, its latency in seconds, and its bytes per second."""

    first: int
    second: int
    seconds: float
    bytes_per_s: float


def measured_pairs(world: World) -> list[tuple[int, int]]:
    """Return the pairs of ranks whose links are measured."""
    every = list(combinations(range(world.size), 2))
    if len(every) <= MOST_PAIRS:
        return every
    first = {host: world.hosts.index(host) for host in dict.fromkeys(world.hosts)}
    chosen = set(first.values()) | set(range(world.local_size))
    return [pair for pair in every if set(pair) <= chosen][:MOST_PAIRS]


def measure_pairs(clock: Clock, world: World) -> Mapping[tuple[int, int], tuple[float, float]]:
    """Return (latency in seconds, bytes per second) of pairs of ranks, one after the other.

    Collective; every rank gets all of them.
    """
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in measured_pairs(world):
        dist.barrier()
        if world.rank in pair:
            other = pair[1] if world.rank == pair[0] else pair[0]
            seconds = [
                _there_and_back(clock, world.rank < other, other, size) / 2
                for size in (SMALL, LARGE)
            ]
            rate = LARGE / max(seconds[1] - seconds[0], 1e-9)
            found[pair] = (seconds[0], rate)
    rows = [_PairFigures(*pair, *figures) for pair, figures in found.items()]
    everyone = gather_facts(rows, list[_PairFigures], doing="the figures of pairs")
    return {row[:2]: row[2:] for part in everyone for row in part}


def _there_and_back(clock: Clock, first: bool, other: int, size: int) -> float:
    message = torch.zeros(size, dtype=torch.uint8, device=clock.device)

    def work() -> None:
        if first:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, other)
            dist.send(message, other)

    return clock.time(f"messages of {size} bytes to rank {other}", work).seconds


def measure_ring(clock: Clock, ranks: Communicator, slowest: float) -> RingFigures:
    """Return the figures of all-reduces. Collective.

    Args:
        clock: of this rank's device.
        ranks: of the line.
        slowest: bytes per second of the slowest pair in it.
    """
    steps = 2 * (ranks.size - 1)
    sizes = [size for size in RINGS if slowest > SLOW_BYTES_PER_S or size < RINGS[-1]]
    points: list[tuple[float, float]] = []
    halves: dict[str, list[float]] = {"all_gather": [], "reduce_scatter": []}
    tiny = torch.zeros(ranks.size, device=clock.device)
    other = torch.zeros(CACHES // 4, device=clock.device)

    def apart() -> None:
        """Begin as in training: ranks computed a while, and threads of messages slept."""
        ranks.all_reduce(tiny).wait()
        other.add_(1)

    def timed(name: str, work: Callable[[], object]) -> float:
        # Lines inside of hosts and between them have timings of their own.
        return clock.time(f"{name} on {ranks.axis.name}", work, before=apart).seconds

    alone = timed("the smallest ring", lambda: ranks.all_reduce(tiny).wait())
    half_alone = timed("the smallest all_gather", lambda: ranks.all_gather(tiny).wait())
    hop = min(alone / steps, max(0.0, 2 * (alone - half_alone) / steps))
    for size in sizes:
        tensor = torch.zeros(size // 4 * ranks.size, device=clock.device)
        seconds = timed(
            f"rings of {size} bytes",
            lambda t=tensor: ranks.all_reduce(t).wait(),  # type: ignore[misc]
        )
        # A noisy smallest ring must not make the others seem to take no time at all.
        points.append((float(size), steps * size / max(seconds - alone, seconds / 2)))
        for name, found in halves.items():
            run = getattr(ranks, name)
            half = timed(f"{name} of {size} bytes", lambda t=tensor, f=run: f(t).wait())  # type: ignore[misc]
            found.append(2 * half / seconds)
    best = max(rate for _, rate in points)
    return RingFigures(
        (alone - hop * steps) / MICRO,
        hop / MICRO,
        best / 1e9,
        [(size, rate / best) for size, rate in points],
        {name: statistics.median(found) for name, found in halves.items()},
    )


def measure_beside(clock: Clock, ranks: Communicator, slowest: float) -> BesideFigures:
    """Return the cost of an all-reduce beside the training of layers. Collective.

    Both take about as long, because a short one tells nothing beside the scatter of a long one.

    Args:
        clock: of this rank's device.
        ranks: of the line.
        slowest: bytes per second of the slowest pair in it.
    """
    layers, x = _layers(clock)
    size = RINGS[-2] if slowest > SLOW_BYTES_PER_S else RINGS[0]
    tensor = torch.zeros(size // 4 * ranks.size, device=clock.device)
    message = clock.time("a ring alone", lambda: ranks.all_reduce(tensor).wait()).seconds

    def train(times: int) -> None:
        for _ in range(times):
            layers(x).sum().backward()

    once = clock.time("a training alone", lambda: train(1)).seconds
    mine = torch.tensor([min(MOST_STEPS, max(1, round(message / once)))], device=clock.device)
    ranks.all_reduce(mine, reduction="max").wait()
    count = int(mine)
    alone = clock.time(f"{count} trainings alone", lambda: train(count)).seconds

    def beside() -> None:
        handle = ranks.all_reduce(tensor)
        train(count)
        handle.wait()

    together = clock.time(f"{count} trainings beside a ring", beside).seconds
    hidden = min(alone, message)
    lost = (together - max(alone, message)) / hidden if hidden else 0.0
    return BesideFigures(
        min(1.0, max(0.0, lost)),
        max(1.0, (together - alone) / message),
    )


def measure_waiting(clock: Clock, ranks: Communicator) -> float:
    """Return the seconds that the smallest ring beside a short training costs more than alone.

    Collective, over ranks of one host. Between hosts this wait hides behind the link: predictions
    that added it there were too long.

    Args:
        clock: of this rank's device.
        ranks: of a line inside of a host.
    """
    layers, x = _layers(clock)
    tiny = torch.zeros(ranks.size, device=clock.device)

    def trainings() -> None:
        for _ in range(SHORT):
            layers(x).sum().backward()

    def beside() -> None:
        for _ in range(SHORT):
            handle = ranks.all_reduce(tiny)
            layers(x).sum().backward()
            handle.wait()

    ring = clock.time("a smallest ring alone", lambda: ranks.all_reduce(tiny).wait()).seconds
    alone = clock.time("short trainings alone", trainings).seconds
    together = clock.time("short trainings beside smallest rings", beside).seconds
    return max(0.0, (together - alone) / SHORT - ring)


def _layers(clock: Clock) -> tuple[nn.Module, Tensor]:
    """Return layers to train, and their input."""
    side = 256 if clock.device.type == "cpu" else 4096
    layers = nn.Sequential(*(nn.Linear(side, side, device=clock.device) for _ in range(LAYERS)))
    return layers, torch.randn(side, side, device=clock.device)


def measure_disk(
    clock: Clock, folder: str | None = None
) -> tuple[float, list[tuple[float, float]]]:
    """Return the bytes per second of synced writes, and (bytes, share of it) by size.

    Rates never fall with the size: a slower longer write is noise.
    """
    points: list[tuple[float, float]] = []
    best = 0.0
    for size in DISK:
        block = os.urandom(size)

        def work(block: bytes = block) -> None:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())

        best = max(best, size / clock.time(f"files of {size} bytes", work).seconds)
        points.append((float(size), best))
    return best, [(size, rate / best) for size, rate in points]


def host_pairs(
    rates: Mapping[tuple[int, int], float], hosts: Sequence[str]
) -> Mapping[str, Any] | None:
    """Return the rates between hosts as a description has them; None on one host.

    Args:
        rates: bytes per second by pair of ranks.
        hosts: of all ranks.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return None
    rows = [[0.0] * len(names) for _ in names]
    for pair, rate in rates.items():
        one, other = (names.index(hosts[rank]) for rank in pair)
        if one != other:
            rows[one][other] = rows[other][one] = max(rows[one][other], float(f"{rate / 1e9:.3g}"))
    return {"hosts": names, "gigabytes_per_second": rows}


def levels_of(rates: Mapping[tuple[int, int], float], ranks: int) -> list[list[tuple[int, ...]]]:
    """Return the groups of ranks at each level of the topology, the closest level first.

    Args:
        rates: bytes per second by pair of ranks.
        ranks: of the run.
    """
    ordered = sorted(rates.values(), reverse=True)
    bounds = [slow for quick, slow in pairwise(ordered) if quick / slow > GAP]
    levels: list[list[tuple[int, ...]]] = []
    for bound in [*bounds, 0.0]:
        groups = [{rank} for rank in range(ranks)]
        for (one, other), rate in rates.items():
            if rate > bound:
                mine, theirs = (next(g for g in groups if each in g) for each in (one, other))
                if mine is not theirs:
                    mine |= theirs
                    groups.remove(theirs)
        level = [tuple(sorted(group)) for group in groups]
        if not levels or level != levels[-1]:
            levels.append(level)
    return levels
