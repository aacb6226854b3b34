"""Failures: what goes wrong on one rank becomes an error on the others, not a hang."""

import time

import pytest
import torch.distributed as dist

from drivetrain.errors import CollectiveError, RankMismatchError
from drivetrain.testing.conformance.suite import Suite
from drivetrain.testing.conformance.twins import Twins, everyone
from drivetrain.testing.models import CASES

SOON_S = 20.0


class FailureChecks(Suite):
    """Errors that users will make."""

    def test_one_rank_that_leaves(self, world: int) -> None:
        """When one rank leaves after an error, backward fails on the others, soon."""
        if world == 1:
            pytest.skip("needs a rank to leave and one to stay")
        accelerator = self.make_accelerator()
        twins = Twins(accelerator, CASES["mlp"])
        twins.backward(0)
        twins.step()
        everyone(None)
        if accelerator.process_index == world - 1:
            accelerator.free_memory()
            dist.destroy_process_group()
            return
        started = time.monotonic()
        with pytest.raises(CollectiveError):
            accelerator.backward(twins.loss(1))
        assert time.monotonic() - started < SOON_S
        accelerator.free_memory()

    def test_ranks_with_different_models(self, world: int) -> None:
        """``prepare`` names the first difference on every rank."""
        if world == 1:
            pytest.skip("needs two ranks to disagree")
        with self.accelerator() as accelerator:
            case = CASES["tied" if accelerator.process_index == 0 else "mlp"]
            with pytest.raises(RankMismatchError, match="rank"):
                accelerator.prepare(case.build())
