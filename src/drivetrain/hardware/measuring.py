"""Measures the ranks of a run and writes a description of their hardware.

``drivetrain hardware measure`` launches this program on every rank.
"""

import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from drivetrain import Accelerator
from drivetrain.collectives import connect
from drivetrain.collectives.communicator import Communicator
from drivetrain.collectives.facts import gather_facts
from drivetrain.hardware.description import UNMEASURED, Hardware
from drivetrain.hardware.measure import (
    BUS,
    BYTES,
    DISK,
    LEAST,
    QUICK_BYTES_PER_S,
    RINGS,
    SIDES,
    Clock,
    Section,
    host_pairs,
    kernel_timings,
    levels_of,
    measure_beside,
    measure_bus,
    measure_device,
    measure_disk,
    measure_kernels,
    measure_pairs,
    measure_ring,
    measure_update,
    measure_waiting,
    measured_pairs,
)
from drivetrain.hardware.prices import MICRO
from drivetrain.log import Bar
from drivetrain.runtime.mesh import Axis

ROUNDS = 5
"""Rounds of measurements of a device; the figures are those of all rounds together."""

ENOUGH_S = 60.0
"""Seconds after which no further round begins, of a device and again of links: a loaded machine has
fewer rounds."""

RING_TIMINGS = 3 * len(RINGS) + 2 + 7
"""Timings of a round of rings of one line, and beside training."""


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
    total += (1 + 2 * (1 + len(BUS))) * (kind == "device")
    bar: Bar[None] = Bar(total=total, desc="measuring", disable=world.rank > 0)
    clock = Clock(world.device, advance=lambda: bar.update(1))
    source = (
        f"measured {time.strftime('%Y-%m-%d')} on {len(set(world.hosts))} host(s) with "
        f"{world.local_size} rank(s) each, all at the same time, with torch {torch.__version__}"
    )
    for _ in _rounds(ROUNDS, bool):
        mine = measure_device(clock, source, world.local_size)
        # A description with this device alone prices plain products and passes.
        plain = described(
            "this device", "this measurement", mine, rings=[None, None], disk=PLACEHOLDER, beside={}
        )
        mine["device"]["kernels"] = measure_kernels(clock, Hardware.model_validate(plain))
    if kind == "device":  # what offload takes: an update beside the device, and the way there
        mine["host"]["memory"] = {"source": source, **measure_update(clock, world.local_size)}
        mine["bus"] = measure_bus(clock)
    disk = measure_disk(clock, str(target.resolve().parent) if world.rank == 0 else None)
    links = (
        _measure_links(accelerator, clock, bar) if world.size > 1 else _Links({}, (None, None), {})
    )
    bar.close()
    mine["loud"] = clock.loud
    every = gather_facts(mine, Section, doing="the figures of ranks")
    if world.rank == 0:
        slowest = min(every, key=lambda each: each["device"]["teraflops"]["no"])
        seconds = time.perf_counter() - started
        values = described(
            target.stem, source, slowest, rings=links.rings, disk=disk, beside=links.beside
        )
        rates = {pair: rate for pair, (_, rate) in links.pairs.items()}
        if between := host_pairs(rates, world.hosts):
            values["links"]["pairs"] = {"source": source, **between}
        notes = [f"{source}, in {seconds:.0f} s; rank 0 on {socket.gethostname()}"]
        products = slowest["device"]["products"]["shares"]
        notes += _notes([each["loud"] for each in every], links.pairs, world.size, products)
        target.write_text(file_text(values, notes), encoding="utf-8")
        sys.stdout.write("\n".join([*notes, f"written: {target}", ""]))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def _rounds(count: int, agree: Callable[[bool], bool]) -> Iterator[int]:
    """Yield the numbers of rounds, so many or until they have taken long enough.

    Args:
        count: the most rounds.
        agree: returns whether they have for all ranks that measure together, from this rank's word.
    """
    begun = time.perf_counter()
    for number in range(count):
        yield number
        if agree(time.perf_counter() - begun > ENOUGH_S):
            return


class _Links(NamedTuple):
    """The figures of links: pairs of ranks, rings inside of a host and between hosts, training."""

    pairs: Mapping[tuple[int, int], tuple[float, float]]
    rings: Sequence[Section | None]
    beside: Section


def _measure_links(accelerator: Accelerator, clock: Clock, bar: Bar[None]) -> _Links:
    """Return the figures of the links of several ranks. Collective."""
    world = accelerator.world
    pairs = measure_pairs(clock, world)
    slowest = min(rate for _, rate in pairs.values())
    ranks = connect(accelerator.mesh["dp"], accelerator.traffic, world.device, world.timeout)
    lines = _lines(accelerator)
    rounds = ROUNDS if slowest > QUICK_BYTES_PER_S else 1
    bar.update((ROUNDS - rounds) * RING_TIMINGS)

    def any_is_late(late: bool) -> bool:
        mine = torch.tensor([int(late)], device=world.device)
        ranks.all_reduce(mine, reduction="max").wait()
        return bool(mine)

    for _ in _rounds(rounds, any_is_late):
        rings = [line and measure_ring(clock, line[0], slowest, line[1]) for line in lines]
        beside = measure_beside(clock, ranks, slowest)
        if lines[0]:
            waiting = measure_waiting(clock, lines[0][0]) / MICRO
            beside["in_training_us"] = float(f"{waiting:.3g}")
    for each in (ranks, *(line[0] for line in lines if line)):
        each.close()
    return _Links(pairs, rings, beside)


def _lines(accelerator: Accelerator) -> list[tuple[Communicator, int] | None]:
    """Return the line inside of a host and the line between hosts; None for a line of one rank.

    Beside each, how many such lines share the link of a host: the lines between hosts, one for each
    rank of a host, are measured side by side.
    """
    world, mesh = accelerator.world, accelerator.mesh
    levels, axis = mesh.start_levels("dp", world), mesh["dp"]
    lines: list[tuple[Axis | None, int]] = [(axis, 1), (None, 1)]
    if levels is not None:
        lines = [(levels.near, 1), (levels.far, levels.near.size)]
    elif len(set(world.hosts)) > 1:
        lines.reverse()
    return [
        (connect(each, accelerator.traffic, world.device, world.timeout), beside)
        if each is not None and each.size > 1
        else None
        for each, beside in lines
    ]


def _notes(
    every: Sequence[dict[str, float]],
    pairs: Mapping[tuple[int, int], tuple[float, float]],
    ranks: int,
    products: Sequence[tuple[float, float]],
) -> Iterator[str]:
    """Yield lines about the measurement: scatter, the matrix of bandwidths, efficiency by size."""
    loud: dict[str, float] = {}
    for found in every:
        for name, scatter in found.items():
            loud[name] = max(scatter, loud.get(name, 0.0))
    for name, scatter in sorted(loud.items(), key=lambda each: -each[1]):
        yield f"WARNING: {name} scattered by {scatter:.0%}: measure again on a quiet machine"
    shown = ", ".join(f"{(size / 2) ** (1 / 3):.0f}: {share:.0%}" for size, share in products)
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


PLACEHOLDER: Section = {
    "latency_us": 1000.0,
    "hop_us": 1000.0,
    "gigabytes_per_second": LEAST,
    "shares": [[1.0, 1.0]],
    "operations": {},
}
"""A link that nobody measured, without source."""


def described(
    name: str,
    source: str,
    device: Section,
    *,
    rings: Sequence[Section | None],
    disk: Section,
    beside: Section,
) -> Section:
    """Return the values of a description; links that were not measured say so.

    Args:
        name: of the description.
        source: when and where everything was measured, for each section.
        device: the sections ``device`` and ``host``, of the slowest rank; ``bus`` where the device
            has one.
        rings: of the ranks of one host, and of one rank per host; None for a line of one rank.
        disk: its link.
        beside: of a collective beside training.
    """
    inside, between = rings
    return {
        "version": 1,
        "name": name,
        "device": device["device"],
        "links": {
            "source": source,
            "reached": 1.0,
            "in_training": 1.0,
            "slowdown": 0,
            **beside,
            "inside": _link(inside, between, source),
            "between": _link(between, inside, source),
            "disk": {"source": source, **disk},
            **({"bus": {"source": source, **device["bus"]}} if "bus" in device else {}),
        },
        "host": device["host"],
    }


def file_text(values: Section, notes: Sequence[str]) -> str:
    """Return the text of a description, with notes in front.

    Raises:
        ValidationError: the values are no description.
    """
    Hardware.model_validate(values)
    lines = "".join(f"# {note}\n" for note in notes)
    return lines + yaml.safe_dump(values, sort_keys=False, width=100)


def _link(ring: Section | None, other: Section | None, source: str) -> Section:
    """Return a link; an unmeasured link is written like the other level, and says so."""
    if ring is not None:
        return {"source": source, **ring}
    told = f"{UNMEASURED}: no two ranks met over this link; the numbers are placeholders"
    told += " of the other level" if other is not None else ""
    return {"source": told, **(other or PLACEHOLDER)}


if __name__ == "__main__":
    main()
