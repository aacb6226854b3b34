"""The table of configurations: which strategies, with which options, the conformance kit trains.

A row is taken on its first number of ranks, and with ``--exhaustive`` on all of them. The main form
of a strategy takes every check and all awkward models. A variant divides, stores or sends
otherwise: it takes the checks that nearly any such mistake fails, and with ``--exhaustive`` the
others, too.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from drivetrain.testing.conformance import StrategyConformance
from drivetrain.testing.models import CASES

DISK = {"optimizer": "nvme", "path": tempfile.gettempdir()}
"""The file has no name there."""

HYBRID = {"name": "fsdp", "sharding": "hybrid", "shard_size": 2}

OF_VARIANTS = frozenset(
    {
        "test_training_equals_one_process",
        "test_clipping_by_the_global_norm",
        "test_cost_equals_ledger",
        "test_saved_run_goes_on_bit_by_bit",
    }
)


SMALL = {name: case for name, case in CASES.items() if not case.large}
"""Without several buckets, and without the largest messages: these are the main form's."""

DIVIDED = {
    name: CASES[name]
    for name in [
        "mlp",
        "tied",
        "adapted",
        "unused",
        "branching",
        "odd_shapes",
        "mixed_dtypes",
        "batchnorm",
    ]
}
"""Ties, frozen and missing gradients, also of one rank alone, uneven ranges, dtypes, buffers: all
that can go wrong where state is divided, stored or sent otherwise. How modules are called is the
main form's."""


@dataclass(frozen=True)
class Row:
    """A configuration.

    Attributes:
        strategy: its name, or its name and options.
        worlds: numbers of ranks; the default run takes the first.
        main: whether it takes every check by default.
        gathers: whether a variant gathers and frees at other times: then it matters how modules are
            called, and it takes all small models.
        hosts: on how many hosts the ranks believe they are.
        without: checks that do not hold.
    """

    strategy: str | Mapping[str, Any]
    worlds: tuple[int, ...]
    main: bool = False
    gathers: bool = False
    hosts: int = 1
    without: frozenset[str] = frozenset()

    def is_default(self, check: str, world: int) -> bool:
        """Return whether the default run takes a check on so many ranks."""
        return world == self.worlds[0] and (self.main or check in OF_VARIANTS)


TABLE: Mapping[str, Row] = {
    "Plain": Row("plain", (2, 1, 3)),
    "Ddp": Row("ddp", (2, 1, 3, 4), main=True),
    "DdpBuckets": Row({"name": "ddp", "bucket_mib": 0.001, "first_bucket_mib": 0.001}, (2,)),
    "DdpHosts": Row("ddp", (4,), hosts=2),
    "Zero1": Row("zero1", (3, 1, 2, 4)),
    "Zero1Whole": Row(
        {"name": "zero1", "partition": "parameter", "bucket_mib": 0.001},
        (2, 3),
        # No name of the script leads to gradients that another rank steps: they cannot be counted.
        without=frozenset({"test_cost_equals_memory"}),
    ),
    "Zero2": Row("zero2", (2, 1, 3, 4), main=True),
    "Zero2Hosts": Row({"name": "zero2", "bucket_mib": 0.001}, (4,), hosts=2),
    "Zero2Host": Row({"name": "zero2", "offload": {"optimizer": "cpu"}}, (2, 1)),
    "Zero2Disk": Row({"name": "zero2", "offload": DISK}, (2, 1)),
    "Zero3": Row("zero3", (2, 1, 3, 4), gathers=True),
    "Zero3Sharded": Row({"name": "zero3", "keep_below": 0}, (3, 1, 2), main=True),
    "Zero3Secondary": Row(
        {"name": "zero3", "keep_below": 0, "secondary": "host"}, (4, 2), hosts=2, gathers=True
    ),
    "Zero3Disk": Row(
        {"name": "zero3", "keep_below": 0, "offload": {**DISK, "params": "nvme"}},
        (2, 1),
        gathers=True,
    ),
    "Fsdp": Row("fsdp", (3, 1, 2, 4), main=True),
    "FsdpGrad": Row({"name": "fsdp", "sharding": "grad"}, (2,), gathers=True),
    "FsdpKept": Row(
        {"name": "fsdp", "reshard_after_forward": False, "live_units": 1}, (3,), gathers=True
    ),
    "FsdpHybrid": Row(HYBRID, (4,)),
    "FsdpHybridLocal": Row({**HYBRID, "accumulate": "local"}, (4,)),
    "FsdpSecondary": Row({"name": "fsdp", "secondary": "host"}, (4,), hosts=2),
    "FsdpHost": Row({"name": "fsdp", "offload": {"optimizer": "cpu", "params": "cpu"}}, (2, 1)),
    "Offload": Row("offload", (1, 2, 3, 4)),
    "Local": Row("local", (2, 1, 3, 4), main=True),
    "Megatron": Row("megatron", (2, 1, 3, 4)),
    "Tensor": Row({"name": "megatron", "tp": 2}, (2, 4), main=True),
    "TensorZero2": Row({"name": "megatron", "tp": 2, "data_parallel": "zero2"}, (4,)),
    "Pipeline": Row({"name": "megatron", "pp": 2}, (2, 4), main=True),
    "Cell": Row({"name": "megatron", "tp": 2, "pp": 2}, (4,)),
}
"""By the names of test classes, without their ``Test``."""


def configured(name: str, base: type[StrategyConformance] = StrategyConformance) -> type:
    """Return the test class of a row; the base overrides checks that are different there."""
    row = TABLE[name]
    of_variant = SMALL if row.gathers or "EXHAUSTIVE_TESTS" in os.environ else DIVIDED

    class Configured(base):
        strategy = row.strategy
        worlds = row.worlds
        cases = base.cases if row.main or base.cases is not CASES else of_variant

        def pytest_generate_tests(self, metafunc):
            if not metafunc.config.getoption("exhaustive"):
                self.worlds = row.worlds[:1]
            super().pytest_generate_tests(metafunc)

        def make_accelerator(self, **options):
            """A host's name has torchrun's number of it as a part."""
            if row.hosts == 1:
                return super().make_accelerator(**options)
            rank, size = (int(os.environ[each]) for each in ("RANK", "WORLD_SIZE"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("GROUP_RANK", str(rank * row.hosts // size))
                return super().make_accelerator(**options)

    Configured.__name__ = Configured.__qualname__ = f"Test{name}"
    Configured.__doc__ = base.__doc__
    Configured.row = row
    return Configured
