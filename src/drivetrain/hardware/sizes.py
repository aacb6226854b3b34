"""Sizes as users type and read them: of devices, models, and bytes. Imports no torch."""

import re
from collections.abc import Mapping

from drivetrain.errors import ConfigError

GIB = 2**30
MIB = 2**20

DEVICES: Mapping[str, int] = {
    "t4": 16, "v100": 32, "a10": 24, "l4": 24, "l40s": 48, "rtx3090": 24, "rtx4090": 24,
    "a100-40": 40, "a100": 80, "h100": 80, "h200": 141, "b200": 180, "mi300x": 192,
}  # fmt: skip
"""GiB of memory of devices, by name."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def device_bytes(text: str) -> int:
    """Return the memory of a device, given by its name or in GiB.

    Raises:
        ConfigError: the name is unknown, and the text is no number above 0.
    """
    if text.lower() in DEVICES:
        return DEVICES[text.lower()] * GIB
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
        raise ConfigError(
            f"expected a number of GiB or one of {', '.join(DEVICES)}, found {text!r}"
        )
    return int(float(text) * GIB)


def parameter_count(text: str) -> int | None:
    """Return the number that a text such as 7B stands for; None for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.upper())
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def unit_of(count: int) -> tuple[str, int]:
    """Return the unit of a table whose largest number this is: GiB at most, KiB at least."""
    return next(
        ((name, size) for name, size in (("GiB", GIB), ("MiB", 2**20)) if count >= size),
        ("KiB", 2**10),
    )


def size_text(count: float) -> str:
    """Write a number of bytes in the largest unit that fits."""
    units = ["TiB", "GiB", "MiB", "KiB"]
    if count < 2**10:
        return f"{count:.0f} B"
    while count >= 2**10 and units:
        count, unit = count / 2**10, units.pop()
    return f"{count:,.1f} {unit}"
