"""Measures the ranks of a run and writes a description of their hardware.

``drivetrain hardware measure`` launches this program on every rank.
"""

import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from drivetrain import Accelerator
from drivetrain.collectives import connect
from drivetrain.collectives.communicator import Communicator
from drivetrain.collectives.facts import gather_facts
from drivetrain.hardware.clock import Clock
from drivetrain.hardware.description import UNMEASURED, Hardware
from drivetrain.hardware.measure import (
    BYTES,
    DISK,
    QUICK_BYTES_PER_S,
    RINGS,
    SIDES,
    BesideFigures,
    DeviceFigures,
    RingFigures,
    host_pairs,
    kernel_timings,
    levels_of,
    measure_beside,
    measure_device,
    measure_disk,
    measure_kernels,
    measure_pairs,
    measure_ring,
    measure_waiting,
    measured_pairs,
)
from drivetrain.hardware.prices import MICRO
from drivetrain.log import Bar
from drivetrain.runtime.mesh import Axis

ROUNDS = 5
"""Rounds of measurements of a device; the figures are those of all rounds together."""

RING_TIMINGS = 3 * len(RINGS) + 2 + 7
"""Timings of a round of rings of one line, and beside training."""


class _Measured(NamedTuple):
    """The figures of a rank's device, and the scatter of measurements by name."""

    figures: DeviceFigures
    loud: dict[str, float]


def main() -> None:
    """Measure, and write the file on rank 0."""
    target = Path(sys.argv[1])
    accelerator = Accelerator()
    started = time.perf_counter()
    world = accelerator.world
    kind = "cpu" if world.device.type == "cpu" else "device"
    total = ROUNDS * (3 * len(SIDES[kind]) + len(BYTES[kind]) + 2 + kernel_timings()) + len(DISK)
    total += 2 * sum(world.rank in pair for pair in measured_pairs(world))
    total += ROUNDS * RING_TIMINGS * (world.size > 1)
    bar: Bar[None] = Bar(total=total, desc="measuring", disable=world.rank > 0)
    clock = Clock(world.device, advance=lambda: bar.update(1))
    for _ in range(ROUNDS):
        figures = measure_device(clock, world.local_size)
        figures = replace(figures, kernels=measure_kernels(clock, _plain(figures)))
    disk = measure_disk(clock, str(target.resolve().parent) if world.rank == 0 else None)
    links = _measure_links(accelerator, clock, bar) if world.size > 1 else _Links()
    bar.close()
    every = gather_facts(_Measured(figures, clock.loud), _Measured, doing="the figures of ranks")
    if world.rank == 0:
        slowest_rank, _ = min(every, key=lambda each: each[0].teraflops["no"])
        seconds = time.perf_counter() - started
        source = (
            f"measured {time.strftime('%Y-%m-%d')} on {len(set(world.hosts))} host(s) with "
            f"{world.local_size} rank(s) each, all at the same time, with torch {torch.__version__}"
        )
        values = described(
            target.stem, source, slowest_rank, rings=links.rings, disk=disk, beside=links.beside,
            per_host=world.local_size,
        )  # fmt: skip
        rates = {pair: rate for pair, (_, rate) in links.pairs.items()}
        if between := host_pairs(rates, world.hosts):
            values["links"]["pairs"] = {"source": source, **between}
        notes = [f"{source}, in {seconds:.0f} s; rank 0 on {socket.gethostname()}"]
        notes += _notes([loud for _, loud in every], links.pairs, world.size, slowest_rank)
        target.write_text(file_text(values, notes), encoding="utf-8")
        sys.stdout.write("\n".join([*notes, f"written: {target}", ""]))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def _plain(figures: DeviceFigures) -> Hardware:
    """Return a description with this device alone, which prices plain products and passes."""
    disk = (1e9, [(1.0, 1.0)])
    values = described(
        "this device", "this measurement", figures, rings=[None, None], disk=disk,
        beside=BesideFigures(), per_host=1,
    )  # fmt: skip
    return Hardware.model_validate(values)


@dataclass(frozen=True)
class _Links:
    """The figures of links: pairs of ranks, rings inside of a host and between hosts, training."""

    pairs: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    rings: Sequence[RingFigures | None] = (None, None)
    beside: BesideFigures = BesideFigures()


def _measure_links(accelerator: Accelerator, clock: Clock, bar: Bar[None]) -> _Links:
    """Return the figures of the links of several ranks. Collective."""
    world = accelerator.world
    pairs = measure_pairs(clock, world)
    slowest = min(rate for _, rate in pairs.values())
    ranks = connect(accelerator.mesh["dp"], accelerator.traffic, world.device, world.timeout)
    lines = _lines(accelerator)
    rounds = ROUNDS if slowest > QUICK_BYTES_PER_S else 1
    bar.update((ROUNDS - rounds) * RING_TIMINGS)
    for _ in range(rounds):
        rings = [line and line.measured(clock, slowest) for line in lines]
        beside = measure_beside(clock, ranks, slowest)
        if lines[0]:
            waiting = measure_waiting(clock, lines[0].ranks)
            beside = replace(beside, in_training_us=waiting / MICRO)
    for each in (ranks, *(line.ranks for line in lines if line)):
        each.close()
    return _Links(pairs, rings, beside)


class _Line(NamedTuple):
    """A line of ranks, and how many such lines share the link of a host."""

    ranks: Communicator
    beside: int

    def measured(self, clock: Clock, slowest: float) -> RingFigures:
        """Return the figures of its rings; the rate is that of all lines of a host together."""
        found = measure_ring(clock, self.ranks, slowest)
        rate = self.beside * found.gigabytes_per_second
        return replace(found, gigabytes_per_second=rate)


def _lines(accelerator: Accelerator) -> list[_Line | None]:
    """Return the line inside of a host and the line between hosts; None for a line of one rank.

    The lines between hosts, one for each rank of a host, are measured side by side.
    """
    world, mesh = accelerator.world, accelerator.mesh
    levels, axis = mesh.start_levels("dp", world), mesh["dp"]
    lines: list[tuple[Axis | None, int]] = [(axis, 1), (None, 1)]
    if levels is not None:
        lines = [(levels.near, 1), (levels.far, levels.near.size)]
    elif len(set(world.hosts)) > 1:
        lines.reverse()
    return [
        _Line(connect(each, accelerator.traffic, world.device, world.timeout), beside)
        if each is not None and each.size > 1
        else None
        for each, beside in lines
    ]


def _notes(
    every: Sequence[dict[str, float]],
    pairs: Mapping[tuple[int, int], tuple[float, float]],
    ranks: int,
    slowest: DeviceFigures,
) -> Iterator[str]:
    """Yield lines about the measurement: scatter, the matrix of bandwidths, efficiency by size."""
    loud: dict[str, float] = {}
    for found in every:
        for name, scatter in found.items():
            loud[name] = max(scatter, loud.get(name, 0.0))
    for name, scatter in sorted(loud.items(), key=lambda each: -each[1]):
        yield f"WARNING: {name} scattered by {scatter:.0%}: measure again on a quiet machine"
    shown = ", ".join(f"{side}: {share:.0%}" for side, share in slowest.efficiency)
    yield f"square products, share of the best rate by rows: {shown}"
    if not pairs:
        yield "links: not measured, since there is one rank alone"
        return
    yield "bandwidth between ranks, in GB/s:"
    for one in range(ranks):
        cells = (pairs.get((min(one, other), max(one, other))) for other in range(ranks))
        texts = (f"{cell[1] / 1e9:8.3g}" if cell else f"{'-':>8}" for cell in cells)
        yield f"rank {one:3}: {' '.join(texts)}"
    rates = {pair: rate for pair, (_, rate) in pairs.items()}
    for number, level in enumerate(levels_of(rates, ranks)):
        groups = " ".join(f"({', '.join(map(str, group))})" for group in level)
        yield f"level {number}: {groups}"


# --- the file: a description for plans, and notes about its making ---


TILES = {True: 64, False: 16}
"""Rows and columns of a tile of products: of devices, and of processors."""

LEAST = 1e-3
"""Shares and times in a file are above zero."""


def described(
    name: str,
    source: str,
    device: DeviceFigures,
    *,
    rings: Sequence[RingFigures | None],
    disk: tuple[float, Sequence[tuple[float, float]]],
    beside: BesideFigures,
    per_host: int,
) -> dict[str, Any]:
    """Return the values of a description; links that were not measured say so.

    Args:
        name: of the description.
        source: when and where everything was measured, for each section.
        device: of the slowest rank.
        rings: of the ranks of one host, and of one rank per host; None for a line of one rank.
        disk: bytes per second, and shares by size.
        beside: of a collective beside training.
        per_host: ranks of a host.
    """
    inside, between = rings
    rate, shares = disk
    return {
        "version": 1,
        "name": name,
        "device": _device(device, source),
        "links": {
            "source": source,
            "reached": 1.0,
            "in_training": _short(beside.in_training),
            "in_training_us": float(f"{beside.in_training_us:.3g}"),
            "slowdown": _short(beside.slowdown) if beside.slowdown else 0,
            "inside": _link(inside, between, source),
            "between": _link(between, inside, source),
            "disk": {
                "source": source,
                "latency_us": 1.0,
                "hop_us": 1.0,
                "gigabytes_per_second": _short(rate / 1e9),
                "shares": _curve(shares),
            },
        },
        "host": {
            "source": source,
            "devices": per_host,
            "dispatch_us": _short(device.dispatch_us),
            "attention": "fused",
            "runs_ahead": device.runs_ahead,
        },
    }


def file_text(values: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Return the text of a description, with notes in front.

    Raises:
        ValidationError: the values are no description.
    """
    Hardware.model_validate(values)
    lines = "".join(f"# {note}\n" for note in notes)
    return lines + yaml.safe_dump(dict(values), sort_keys=False, width=100)


def _device(device: DeviceFigures, source: str) -> dict[str, Any]:
    """Return the section of a device."""
    tile = TILES[device.runs_ahead]
    return {
        "source": source,
        "teraflops": {key: _short(each) for key, each in device.teraflops.items()},
        "launch_us": _short(device.launch_us),
        "kernels": {
            kind: {
                "times": [[float(f"{size:.3g}"), _short(times)] for size, times in each.times],
                "start_us": _short(each.start_us),
            }
            for kind, each in device.kernels.items()
        },
        "products": {
            "source": source,
            "processors": 1,
            "tiles": [[tile, tile, 1.0]],
            "depth": 0,
            "shares": _curve([(2.0 * side**3, share) for side, share in device.efficiency]),
        },
        "memory": {
            "source": source,
            "gib": _short(device.memory_gib),
            "gigabytes_per_second": _short(device.gigabytes_per_second),
            "shares": _curve(device.memory_shares),
        },
    }


def _link(ring: RingFigures | None, other: RingFigures | None, source: str) -> dict[str, Any]:
    """Return a link; an unmeasured link is written like the other level, and says so."""
    told = source
    if ring is None:
        told = f"{UNMEASURED}: no two ranks met over this link; the numbers are placeholders"
        told += " of the other level" if other is not None else ""
        ring = other or RingFigures(1000.0, 1000.0, LEAST, [(1.0, 1.0)])
    rate = ring.gigabytes_per_second
    return {
        "source": told,
        "latency_us": _short(ring.latency_us),
        "hop_us": _short(ring.hop_us),
        "gigabytes_per_second": _short(rate),
        "shares": _curve(ring.shares),
        "operations": {name: _short(times) for name, times in ring.operations.items()},
    }


def _curve(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[size, max(LEAST, min(1.0, _short(share)))] for size, share in points]


def _short(value: float) -> float:
    return max(float(f"{value:.3g}"), LEAST)


if __name__ == "__main__":
    main()
