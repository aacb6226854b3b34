"""Strategies with state in stores pass every conformance check that they pass without.

The strategy ``offload`` with its defaults is tested with those of all registered strategies.
"""

import tempfile
from typing import ClassVar

import pytest

from drivetrain.errors import UsageError
from drivetrain.testing.conformance import StrategyConformance
from drivetrain.testing.conformance.twins import Twins
from drivetrain.testing.models import CASES

DISK = {"optimizer": "nvme", "path": tempfile.gettempdir()}
"""The file has no name there."""

pytestmark = pytest.mark.variants


class ParametersOnDisk(StrategyConformance):
    """What is different where parameters lie on a disk."""

    def test_taken_off(self, world: int) -> None:
        """After ``free_memory`` the only rank has nothing either: the store is closed."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, CASES["mlp"])
            twins.backward(0)
            twins.step()
            inner = accelerator.unwrap_model(twins.model)
            accelerator.free_memory()
            with pytest.raises(UsageError, match="lay in a store"):
                twins.case.loss(inner, twins.case.batch(1, twins.axis.rank))


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


class TestZero3Disk(ParametersOnDisk):
    """Parameters and state on a disk."""

    strategy: ClassVar = {"name": "zero3", "keep_below": 0, "offload": {**DISK, "params": "nvme"}}
    worlds = (1, 2)


class TestFsdpHost(StrategyConformance):
    """Rows, state in host memory."""

    strategy: ClassVar = {"name": "fsdp", "offload": {"optimizer": "cpu", "params": "cpu"}}
    worlds = (1, 2)


class TestFsdpDisk(ParametersOnDisk):
    """Rows and state on a disk."""

    strategy: ClassVar = {"name": "fsdp", "offload": {**DISK, "params": "nvme"}}
    worlds = (1, 2)
