"""Failures: a failure of one rank becomes an error on the others, not a hang."""

import pytest

from drivetrain.errors import CollectiveError, RankMismatchError
from drivetrain.testing.conformance.accounts import cut_connections, is_supported
from drivetrain.testing.conformance.suite import Suite
from drivetrain.testing.conformance.twins import Twins, everyone
from drivetrain.testing.models import CASES


class FailureChecks(Suite):
    """Errors that users will make."""

    def test_one_rank_that_dies(self, world: int) -> None:
        """When the process of one rank ends, backward fails on the others, before the timeout."""
        if world == 1 or not is_supported():
            pytest.skip("needs a rank to end and one to stay, and Linux")
        accelerator = self.make_accelerator()
        twins = Twins(accelerator, CASES["mlp"])
        twins.backward(0)
        twins.step()
        everyone(None)
        if accelerator.process_index == world - 1:
            cut_connections()
            accelerator.free_memory()
            return
        with pytest.raises(CollectiveError):
            accelerator.backward(twins.loss(1))
        accelerator.free_memory()

    def test_ranks_with_different_models(self, world: int) -> None:
        """``prepare`` names the first difference on every rank."""
        if world == 1:
            pytest.skip("needs two ranks to disagree")
        with self.accelerator() as accelerator:
            case = CASES["tied" if accelerator.process_index == 0 else "mlp"]
            with pytest.raises(RankMismatchError, match="rank"):
                accelerator.prepare(case.build())
