"""The kit's checks of accounts and parity with two tensor-parallel ranks per cell.

The whole kit runs with the defaults, where a cell is one rank. Not all of its awkward models can be
divided: what is about them is checked for those that can. None has repeated blocks, so none can be
cut into stages.
"""

from typing import ClassVar

import pytest

from drivetrain.cost import ModelSpec
from drivetrain.testing.conformance.accounts import AccountChecks
from drivetrain.testing.conformance.parity import ParityChecks
from drivetrain.testing.conformance.twins import Twins, plain_sgd
from drivetrain.testing.models import CASES

REFUSED = {
    "tied": "its only block is given tokens",
    "branching": "its forward needs to know the rank",
    "odd_shapes": "a parameter without dims",
    "transposed": "no layer tells what goes in",
    "mixed_dtypes": "a layer computes in bf16 whatever comes in, and the trial is in fp64",
}


class TestTensorParallel(AccountChecks, ParityChecks):
    strategy: ClassVar = {"name": "megatron", "tp": 2}
    worlds = (2, 4)

    def test_training_equals_one_process(self, world, case):
        if case in REFUSED:
            pytest.skip(f"cannot be divided: {REFUSED[case]}")
        super().test_training_equals_one_process(world, case)

    def test_cost_equals_ledger(self, world):
        """Over dp; what activations send over tp needs inputs, see the tests of the cost."""
        for name in sorted(CASES.keys() - REFUSED.keys()):
            case = CASES[name]
            with self.accelerator() as accelerator:
                twins = Twins(accelerator, case, plain_sgd)
                strategy = accelerator.strategy_of(twins.model)
                spec = ModelSpec.of(case.build(), states=0)
                promised = type(strategy).cost(strategy.config, spec, strategy.run).sent
                train(twins)
                before = over_dp(accelerator)
                train(twins)
                grown = {key: n - before.get(key, 0) for key, n in over_dp(accelerator).items()}
                if accelerator.is_main_process:
                    assert {key: n for key, n in grown.items() if n} == promised, name


def train(twins):
    batch = twins.case.batch(0, twins.axis.rank)
    twins.accelerator.backward(twins.case.loss(twins.model, batch))
    twins.optimizer.step()
    twins.optimizer.zero_grad()


def over_dp(accelerator):
    return {key: n for key, n in accelerator.traffic.sent().items() if key[0] == "dp"}
