"""Every conformance check with all parameters divided, those too that stage 3 usually keeps whole.

Every forward is then collective: what ranks may do by themselves elsewhere they do together here.
Ranks of two hosts do the same with secondary shards: of one rank each, and of two ranks each.
"""

import os
from typing import ClassVar

import pytest
import torch

from drivetrain.cost import ModelSpec
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.testing.conformance import StrategyConformance
from drivetrain.testing.conformance.twins import Twins, everyone, plain_sgd
from drivetrain.testing.models import CASES

STEPS, HOSTS = 2, 2


class TestSharded(StrategyConformance):
    """Stage 3 of every parameter, however small."""

    strategy: ClassVar = {"name": "zero3", "keep_below": 0}
    worlds: ClassVar = (1, 2, 3)
    gathered: ClassVar = ("dp", "all_gather")
    waited: ClassVar = "the ranks took different paths"

    def test_cost_equals_ledger(self, world):
        """The promise is a bound here: what backward needs no values of is not gathered again."""
        for name, case in CASES.items():
            with self.accelerator() as accelerator:
                twins = Twins(accelerator, case, plain_sgd)
                strategy = accelerator.strategy_of(twins.model)
                spec = ModelSpec.of(case.build(), states=0)
                promised = type(strategy).cost(strategy.config, spec, strategy.run).sent
                twins.backward(0)
                twins.step()
                before = accelerator.traffic.sent()
                for step in range(STEPS):
                    batch = case.batch(step, twins.axis.rank)
                    accelerator.backward(case.loss(twins.model, batch))
                    twins.optimizer.step()
                    twins.optimizer.zero_grad()
                after = accelerator.traffic.sent()
                found = {key: (n - before.get(key, 0)) / STEPS for key, n in after.items()}
                gathered, bound = found.pop(self.gathered, 0), promised.pop(self.gathered, 0)
                assert bound / 2 <= gathered <= bound, f"{name}: {gathered} bytes, bound {bound}"
                assert {k: n for k, n in found.items() if n} == promised, name

    def test_taken_off(self, world):
        """After ``free_memory`` divided values are refused; the only rank has them whole."""
        if world == 1:
            super().test_taken_off(world)
            return
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, CASES["mlp"])
            inner = accelerator.unwrap_model(twins.model)
            accelerator.free_memory()
            with pytest.raises(UsageError, match=r"save_model\(\)"):
                twins.case.loss(inner, twins.case.batch(0, 0))

    def test_evaluation_between_steps(self, world):
        """Forwards without gradients: together, or each rank by itself once all is gathered."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, CASES["batchnorm"])
            batch = twins.case.batch(99, 0)
            for step in range(3):
                twins.model.eval()
                with torch.no_grad():
                    twins.case.loss(twins.model, batch)
                twins.model.train()
                with accelerator.inference(twins.model) as model:
                    for _ in range(1 + twins.axis.rank):
                        twins.case.loss(model, batch)
                twins.backward(step)
                twins.step()
            twins.check()

    def test_loss_that_misses_the_model_on_one_rank(self, world):
        """That rank does not gather for the others: an error on all of them, no waiting."""
        if world == 1:
            super().test_loss_that_misses_the_model_on_one_rank(world)
            return
        accelerator = self.make_accelerator()
        twins = Twins(accelerator, CASES["mlp"])
        with pytest.raises(CollectiveError) as error:
            if twins.axis.rank == world - 1:
                accelerator.backward(torch.zeros((), dtype=torch.float64, requires_grad=True))
            else:
                accelerator.backward(twins.loss(0))
        # A rank that neither sees the difference is told by the connections that the others close.
        accelerator.free_memory()
        messages = everyone(str(error.value))
        assert any(self.waited in message for message in messages)


class TestSecondary(TestSharded):
    """Hosts keep all values: gathers stay inside of them, and what is stepped crosses once."""

    strategy: ClassVar = {"name": "zero3", "keep_below": 0, "secondary": "host"}
    worlds: ClassVar = (2, 4)
    gathered: ClassVar = ("dp.near", "all_gather")
    waited: ClassVar = "every rank must come to each collective, in the same order"

    def make_accelerator(self, **options):
        """Let ranks believe in two hosts: a host's name has torchrun's number of it as a part."""
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GROUP_RANK", str(rank * HOSTS // size))
            return super().make_accelerator(**options)

    def test_loss_that_misses_the_model_on_one_rank(self, world):
        """The only rank of a host gathers from nobody: there a loss may miss the model."""
        if world > HOSTS:
            super().test_loss_that_misses_the_model_on_one_rank(world)
            return
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, CASES["mlp"])
            if twins.axis.rank == world - 1:
                accelerator.backward(torch.zeros((), dtype=torch.float64, requires_grad=True))
            else:
                accelerator.backward(twins.loss(0))
            twins.backward_twin(0, without=world - 1)
            twins.step()
            twins.check()
