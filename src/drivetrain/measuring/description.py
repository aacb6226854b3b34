"""The file of a measurement: a description for plans, and notes about its making."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from drivetrain.hardware.description import UNMEASURED, Hardware
from drivetrain.measuring.device import DeviceFigures
from drivetrain.measuring.links import BesideFigures, RingFigures

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
        ring = other or RingFigures(1, 1000.0, 1000.0, LEAST, [(1.0, 1.0)])
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
