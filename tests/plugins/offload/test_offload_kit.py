"""Strategies with state in stores pass every conformance check that they pass without.

The strategy ``offload`` with its defaults is tested with those of all registered strategies.
"""

import tempfile
from typing import ClassVar

from drivetrain.testing.conformance import StrategyConformance

DISK = {"optimizer": "nvme", "path": tempfile.gettempdir()}
"""The file has no name there."""


class TestOffloadDisk(StrategyConformance):
    """The strategy of the package, on a disk."""

    strategy: ClassVar = {"name": "offload", **DISK}
    worlds = (1, 2)


class TestZero2Host(StrategyConformance):
    """Gradients divided, state in host memory."""

    strategy: ClassVar = {"name": "zero2", "offload": {"optimizer": "cpu"}}
    worlds = (1, 2)


class TestZero2Disk(StrategyConformance):
    """Gradients divided, state on a disk."""

    strategy: ClassVar = {"name": "zero2", "offload": DISK}
    worlds = (1, 2)


class TestZero3Host(StrategyConformance):
    """Parameters divided, state in host memory."""

    strategy: ClassVar = {"name": "zero3", "keep_below": 0, "offload": {"optimizer": "cpu"}}
    worlds = (1, 2)


class TestZero3Disk(StrategyConformance):
    """Parameters and state on a disk."""

    strategy: ClassVar = {"name": "zero3", "keep_below": 0, "offload": {**DISK, "params": "nvme"}}
    worlds = (1, 2)


class TestFsdpHost(StrategyConformance):
    """Rows, state in host memory."""

    strategy: ClassVar = {"name": "fsdp", "offload": {"optimizer": "cpu", "params": "cpu"}}
    worlds = (1, 2)


class TestFsdpDisk(StrategyConformance):
    """Rows and state on a disk."""

    strategy: ClassVar = {"name": "fsdp", "offload": {**DISK, "params": "nvme"}}
    worlds = (1, 2)
