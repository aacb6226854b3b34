"""Strategies of the data-parallel axis over two hosts with two ranks each: values and bytes."""

import os

import pytest

from drivetrain.testing.conformance import StrategyConformance
from drivetrain.testing.models import CASES

RANKS, PER_HOST = 4, 2


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_over_two_hosts(monkeypatch, strategy):
    # A host's name has torchrun's number of the host as a part.
    monkeypatch.setenv("GROUP_RANK", str(int(os.environ["RANK"]) // PER_HOST))
    kit = type("OverHosts", (StrategyConformance,), {"strategy": strategy})()
    with kit.accelerator() as accelerator:
        assert accelerator.world.spans_hosts
    kit.test_cost_equals_ledger(RANKS)
    kit.test_accumulation_with_a_partial_window(RANKS)
    for case in list(CASES)[::4]:
        kit.test_training_equals_one_process(RANKS, case)
