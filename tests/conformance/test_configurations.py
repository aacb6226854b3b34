"""Every configuration of the table passes the conformance kit.

What is another promise under some configuration is a base class here: the checks that it overrides
say what holds instead.
"""

from importlib.metadata import entry_points
from typing import ClassVar

import pytest
import torch

from configurations import TABLE, configured
from drivetrain.cost import ModelSpec
from drivetrain.errors import CollectiveError, UsageError
from drivetrain.registry import STRATEGIES
from drivetrain.testing.conformance import StrategyConformance
from drivetrain.testing.conformance.suite import Twins, cut_connections, everyone, plain_sgd
from drivetrain.testing.models import CASES, Case, cross_entropy, tokens
from stacks import Gpt, Tower

STEPS, HOSTS = 2, 2

IN_STAGES = {
    "test_training_equals_one_process",
    "test_accumulation_with_a_partial_window",
    "test_clipping_by_the_global_norm",
    "test_shards_hold_everything_once",
    "test_saved_run_goes_on_bit_by_bit",
    "test_nothing_outlives_its_step",
}


class Divided(StrategyConformance):
    """All parameters divided, however small: every forward is collective.

    What ranks may do by themselves elsewhere they do together here.
    """

    gathered: ClassVar = ("dp", "all_gather")
    waited: ClassVar = "the ranks took different paths"

    def test_cost_equals_ledger(self, world):
        """The promise is a bound here: what backward needs no values of is not gathered again."""
        with self.accelerator() as accelerator:
            for name, case in self.cases.items():
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
                accelerator.free_memory()

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
        twins.backward(0)  # all ranks meet before the first gradients
        twins.step()
        with pytest.raises(CollectiveError) as error:
            if twins.axis.rank == world - 1:
                accelerator.backward(torch.zeros((), dtype=torch.float64, requires_grad=True))
            else:
                accelerator.backward(twins.loss(0))
        # A rank that neither sees the difference is told by the connections that the others close.
        accelerator.free_memory()
        messages = everyone(str(error.value))
        assert any(self.waited in message for message in messages)


class Secondary(Divided):
    """Hosts keep all values: gathers stay inside of them, and what is stepped crosses once."""

    gathered: ClassVar = ("dp.near", "all_gather")
    waited: ClassVar = "every rank must come to each collective, in the same order"

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


class OnDisk(StrategyConformance):
    """What is different where parameters lie on a disk."""

    def test_taken_off(self, world):
        """After ``free_memory`` the only rank has nothing either: the store is closed."""
        with self.accelerator() as accelerator:
            twins = Twins(accelerator, CASES["mlp"])
            twins.backward(0)
            twins.step()
            inner = accelerator.unwrap_model(twins.model)
            accelerator.free_memory()
            with pytest.raises(UsageError, match="lay in a store"):
                twins.case.loss(inner, twins.case.batch(1, twins.axis.rank))


class Cells(StrategyConformance):
    """The ranks of a cell get the same batches; their activations travel over ``tp``.

    Some of the awkward models cannot be divided: they train whole on each rank of a cell.
    """

    inner_axes: ClassVar = ("tp",)
    rounding: ClassVar = 2.0**-8
    """Ranks add their parts of a product in the low dtype."""

    def test_cost_equals_ledger(self, world):
        """Over dp; what activations send over tp needs inputs, see the tests of the cost."""
        with self.accelerator() as accelerator:
            for name, case in self.cases.items():
                twins = Twins(accelerator, case, plain_sgd)
                strategy = accelerator.strategy_of(twins.model)
                spec = ModelSpec.of(case.build(), states=0)
                promised = type(strategy).cost(strategy.config, spec, strategy.run)
                assert promised.uncounted == {"tp": "activations"}
                train(twins)
                before = over_dp(accelerator)
                train(twins)
                grown = {key: n - before.get(key, 0) for key, n in over_dp(accelerator).items()}
                if accelerator.is_main_process:
                    assert {key: n for key, n in grown.items() if n} == promised.sent, name
                accelerator.free_memory()

    def test_one_rank_that_dies(self, world):
        """Its cell fails at once; another cell when the processes of the first one end."""
        accelerator = self.make_accelerator()
        twins = Twins(accelerator, CASES["mlp"])
        twins.backward(0)
        twins.step()
        everyone(None)
        if accelerator.process_index < world - 1:
            with pytest.raises(CollectiveError):
                accelerator.backward(twins.loss(1))
        cut_connections()
        accelerator.free_memory()

    def test_taken_off(self, world):
        """After ``free_memory`` a divided model is refused; a whole one trains by itself."""
        with self.accelerator() as accelerator:
            divided = Twins(accelerator, CASES["mlp"])
            whole = Twins(accelerator, CASES["batchnorm"])
            inner = [accelerator.unwrap_model(twins.model) for twins in (divided, whole)]
            accelerator.free_memory()
            before = accelerator.traffic.total()
            with pytest.raises(UsageError, match=r"not to be called after free_memory.*save_model"):
                divided.case.loss(inner[0], divided.case.batch(0, 0))
            whole.case.loss(inner[1], whole.case.batch(0, 0)).backward()
            assert accelerator.traffic.total() == before


class Stages(Cells):
    """Models of blocks, cut into stages; the output is real on the last stage only.

    What happens at the border of stages is tested in the folder of the pipeline.
    """

    inner_axes: ClassVar = ("tp", "pp")
    cases: ClassVar = {
        "blocks": Case("blocks", lambda: Tower(4)),
        "tied": Case("tied", lambda: Gpt(4), tokens, cross_entropy),
    }


for _name in dir(StrategyConformance):
    if _name.startswith("test") and _name not in IN_STAGES:
        setattr(Stages, _name, None)  # pytest collects functions


def train(twins):
    batch = twins.case.batch(0, twins.axis.rank)
    twins.accelerator.backward(twins.case.loss(twins.model, batch))
    twins.optimizer.step()
    twins.optimizer.zero_grad()


def over_dp(accelerator):
    return {key: n for key, n in accelerator.traffic.sent().items() if key[0] == "dp"}


BASES = {
    "Zero3Sharded": Divided,
    "Zero3Secondary": Secondary,
    "Zero3Disk": OnDisk,
    "Tensor": Cells,
    "TensorZero2": Cells,
    "Pipeline": Stages,
    "Cell": Stages,
}

for _name in TABLE:
    globals()[f"Test{_name}"] = configured(_name, BASES.get(_name, StrategyConformance))


def test_every_strategy_that_trains_is_in_the_table():
    """All that this distribution provides: ``auto`` chooses one of them."""
    provided = {
        entry.name
        for entry in entry_points(group=STRATEGIES)
        if entry.dist is not None and entry.dist.name == "drivetrain"
    }
    rows = {
        row.strategy if isinstance(row.strategy, str) else row.strategy["name"]
        for row in TABLE.values()
    }
    assert rows == provided - {"auto"}
