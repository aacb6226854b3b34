"""The figures that the choice of methods needs: the rate between hosts, the time of encodings.

All of them are of the slowest rank, and equal on all ranks.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from drivetrain.collectives import connect, sent_elements
from drivetrain.collectives.facts import gather_facts, share_facts
from drivetrain.links.compressor import Compressor
from drivetrain.links.rule import EncodingTime
from drivetrain.measuring.clock import Clock
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World, host_link
from drivetrain.traffic import Traffic

FIRST, LARGEST, GROWTH = 2**14, 2**24, 4
"""Numbers of the smallest and of the largest sum that measures a link: 64 KiB and 64 MiB."""

LONG_ENOUGH_S = 0.2
"""Seconds of a sum that says the rate: latencies and bursts are a small part of it."""

ROWS, COLUMNS = (2, 1024), 1024
"""Rows of the two matrices that are encoded for a measurement, and columns of both: the smallest
size that methods encode, and a size at which memory, not the call, takes the time."""


def rate_between_hosts(declared_mbit: float, world: World) -> tuple[float, str]:
    """Return the rate between hosts in bytes per second, and its source. Collective.

    Args:
        declared_mbit: Mbit/s from the configuration; 0 where it has none.
        world: all ranks, on several hosts.

    Raises:
        ConfigError: hosts have different numbers of ranks, or not in a row.
        PreflightError: the launcher's figure is no number.
    """
    if declared_mbit:
        return declared_mbit * 1e6 / 8, "as links.mbit_per_s says"
    launched = 0.0 if world.declared else host_link()  # of launchers, whatever lies between islands
    if link := share_facts(launched, float, doing="the launcher's rate between hosts"):
        return link, "as the launcher measured"
    return _measured_rate(world), "measured now"


def slowest_times(
    methods: Mapping[str, Compressor[Any]], device: torch.device
) -> dict[str, EncodingTime]:
    """Return the time that each method takes on the slowest rank. Collective where ranks run."""
    mine = _times(methods, Clock(device))
    every = gather_facts(
        mine, dict[str, tuple[float, float]], doing="the time of methods for slow links"
    )
    slowest = {}
    for name in methods:
        small_s, large_s = (max(each[name][index] for each in every) for index in range(2))
        small, large = (rows * COLUMNS for rows in ROWS)
        per_number_s = max(0.0, large_s - small_s) / (large - small)
        slowest[name] = EncodingTime(max(0.0, small_s - per_number_s * small), per_number_s)
    return slowest


def _times(methods: Mapping[str, Compressor[Any]], clock: Clock) -> dict[str, tuple[float, float]]:
    """Return the seconds of each method for the small and the large matrix on this rank."""
    found = {}
    for name, method in methods.items():
        small_s, large_s = (
            clock.time(
                f"{name} of {rows} rows",
                partial(method.rehearse, torch.randn(rows, COLUMNS, device=clock.device)),
            ).seconds
            for rows in ROWS
        )
        found[name] = small_s, large_s
    return found


def _measured_rate(world: World) -> float:
    """Return the bytes per second that a host sends in sums over hosts. Collective."""
    name = "links"
    mesh = Mesh.build({name: world.size}, world)
    per_host = mesh.per_host(name, world)
    axis = mesh.start_across(name, per_host, world)
    ranks = connect(axis, Traffic(), world.device, world.timeout)
    try:
        numel, seconds = FIRST, 0.0
        ranks.all_reduce(torch.zeros(numel, device=world.device)).wait()  # opens connections
        while True:
            tensor = torch.zeros(numel, device=world.device)
            gather_facts(numel, int, doing="the measurement of the link between hosts")
            start = time.perf_counter()
            ranks.all_reduce(tensor).wait()
            if world.device.type != "cpu":
                torch.accelerator.synchronize(world.device)
            mine = time.perf_counter() - start
            seconds = max(gather_facts(mine, float, doing="the time between hosts"))
            if seconds >= LONG_ENOUGH_S or numel >= LARGEST:
                break
            numel *= GROWTH
    finally:
        ranks.close()
    sent = sent_elements("all_reduce", numel, size=axis.size) * torch.float32.itemsize
    return sent * per_host / seconds
