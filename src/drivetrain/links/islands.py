"""The islands of a run: groups of ranks with quick links among them, as a file declares.

Without a declaration, the ranks of one host are an island. Host names say less where a machine runs
several containers, or where one host has two groups of devices with a slow link between them. Then
``links.hardware`` names a description of hardware, and its ``host.devices`` is the size of islands.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from drivetrain.collectives.facts import gather_facts
from drivetrain.errors import ConfigError, DrivetrainError, RankMismatchError
from drivetrain.hardware.catalog import load_hardware
from drivetrain.runtime.world import World

KEY = "links.hardware"


@dataclass(frozen=True, slots=True)
class _Reading:
    """A rank's reading of the description: the size of islands, or why there is none."""

    devices: int = 0
    problem: str = ""


def agreed_islands(world: World, hardware: str) -> World:
    """Return the world with the islands that a description declares. Collective.

    Args:
        world: all ranks.
        hardware: name of the description, or a file; "" leaves the hosts as islands.

    Raises:
        ConfigError: the description cannot be read, or does not fit the ranks; on every rank.
        RankMismatchError: ranks have read different sizes; on every rank.
    """
    if not hardware or world.size == 1:
        return world
    try:
        mine = _Reading(load_hardware(hardware).host.devices)
    except DrivetrainError as error:  # the other ranks wait for an answer
        mine = _Reading(problem=str(error))
    every = gather_facts(mine, _Reading, doing=f"the sizes of islands in {KEY}")
    for rank, reading in enumerate(every):
        if reading.problem:
            raise ConfigError(f"{KEY}: rank {rank}: {reading.problem}")
        if reading != every[0]:
            raise RankMismatchError(
                f"{KEY}: expected the same host.devices on all ranks, found {every[0].devices} on "
                f"rank 0 and {reading.devices} on rank {rank}; give all hosts the same file"
            )
    return in_islands(world, mine.devices)


def declared_islands(world: World, hardware: str) -> World:
    """Return a planned world with the islands that a description declares, without other ranks.

    Args:
        world: all ranks.
        hardware: name of the description, or a file; "" leaves the hosts as islands.

    Raises:
        ConfigError: the description cannot be read, or does not fit the ranks.
    """
    if not hardware or world.size == 1:
        return world
    return in_islands(world, load_hardware(hardware).host.devices)


def in_islands(world: World, size: int) -> World:
    """Return the world with islands of so many consecutive ranks.

    Raises:
        ConfigError: the ranks cannot be cut into such islands, or an island has a part of a host
            and ranks of another host.
    """
    if world.size % size:
        raise ConfigError(
            f"{KEY}: expected a number of ranks that host.devices divides, found {world.size} "
            f"ranks and host.devices: {size}; change the number of ranks, or the description"
        )
    for island in _cut(range(world.size), size):
        hosts = {world.hosts[rank] for rank in island}
        outside = [r for r, host in enumerate(world.hosts) if host in hosts and r not in island]
        if len(hosts) > 1 and outside:
            raise ConfigError(
                f"{KEY}: expected islands that lie on one host, or hold whole hosts, found with "
                f"host.devices: {size} an island of ranks {', '.join(map(str, island))} on hosts "
                f"{', '.join(sorted(hosts))}, which have rank {outside[0]}, too; change "
                "host.devices, or the number of ranks per host"
            )
    return replace(world, declared=tuple(f"island {rank // size}" for rank in range(world.size)))


def _cut(ranks: range, size: int) -> Iterator[range]:
    return (ranks[start : start + size] for start in range(0, len(ranks), size))
