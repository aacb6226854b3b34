"""The options of fsdp that change what is divided, and when, pass every conformance check.

The defaults are tested with those of all registered strategies.
"""

import os
from typing import ClassVar

import pytest

from drivetrain.testing.conformance import StrategyConformance

pytestmark = pytest.mark.variants


class TestHybrid(StrategyConformance):
    """Two groups of two ranks: rows inside of a group, replicas between groups."""

    strategy: ClassVar = {"name": "fsdp", "sharding": "hybrid", "shard_size": 2}
    worlds = (4,)


class TestHybridLocal(StrategyConformance):
    """The same, with whole gradients during an accumulation window."""

    strategy: ClassVar = {
        "name": "fsdp",
        "sharding": "hybrid",
        "shard_size": 2,
        "accumulate": "local",
    }
    worlds = (4,)


class TestGrad(StrategyConformance):
    """Parameters are whole from the first forward until the optimizer steps."""

    strategy: ClassVar = {"name": "fsdp", "sharding": "grad"}
    worlds = (2,)


class TestKept(StrategyConformance):
    """Parameters are whole until backward, and one unit at a time travels."""

    strategy: ClassVar = {"name": "fsdp", "reshard_after_forward": False, "live_units": 1}
    worlds = (3,)


class TestSecondary(StrategyConformance):
    """Two hosts of two ranks keep all values each: gathers stay inside of them."""

    strategy: ClassVar = {"name": "fsdp", "secondary": "host"}
    worlds = (4,)

    def make_accelerator(self, **options):
        """Let ranks believe in two hosts: a host's name has torchrun's number of it as a part."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // 2))
            return super().make_accelerator(**options)
