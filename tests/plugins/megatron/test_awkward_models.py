"""Awkward models under tensor parallelism: what is said of them, and what cannot be divided."""

import copy
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.collectives.solo import SoloCommunicator
from drivetrain.errors import ConfigError, UsageError
from drivetrain.runtime.mesh import Axis
from drivetrain.testing.conformance.twins import Twins, adamw, everyone
from drivetrain.testing.models import CASES
from drivetrain.traffic import Traffic
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.plan.model import TensorParallel
from drivetrain_megatron.plan.named import users_plan
from drivetrain_megatron.plan.report import describe
from drivetrain_megatron.recording.calls import inputs_for

WHOLE = {
    "adapted": "the model: whole",
    "unused": "the model: whole",
    "branching": "no inputs were found",
    "odd_shapes": "the model: whole",
    "transposed": "no inputs were found",
    "mixed_dtypes": "it cannot be tried in fp64: RuntimeError: mat1 and mat2 must have the same",
    "batchnorm": "last stays whole",
    "called_twice": "the model: whole",
    "two_outputs": "main stays whole",
}
"""Models that cannot be divided, and what the report says."""

NAMES = [name for name, case in CASES.items() if not case.large]
EACH = pytest.mark.parametrize("name", NAMES)
SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])
AXIS = Axis(name="tp", size=2, rank=0, ranks=(0, 1), hosts=("here", "here"))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])
def test_reports(sequence_parallel):
    """What stays whole has its bytes in the report, and the reason if there is more to say."""
    for name in NAMES:
        check_report(name, sequence_parallel)


def check_report(name, sequence_parallel):
    model = CASES[name].build()
    ranks = SoloCommunicator(AXIS, Traffic(), timedelta(seconds=1))
    config = MegatronConfig(tp=2, sequence_parallel=sequence_parallel)
    tensor = TensorParallel(ranks, sequence_parallel=sequence_parallel, named=None, strict=False)
    plan = tensor.plan(model, inputs_for(config, model))
    nbytes = {key: p.nbytes for key, p in model.named_parameters()}
    text = "\n".join(describe(plan, tensor.facts(model, plan), nbytes, 2))
    assert (": 0 of " in text and "100.0% of the bytes stay whole" in text) == (name in WHOLE)
    assert WHOLE.get(name, "whole on each rank: ") in text
    assert ("by words: embedding, head" in text) == (name == "tied")


@EACH
@pytest.mark.ranks(2)
def test_training_with_sequence_parallelism(name):
    """Where there is nothing between groups of layers to divide, it changes nothing."""
    strategy = {"name": "megatron", "tp": 2, "sequence_parallel": True}
    accelerator = Accelerator(strategy=strategy, cpu=True)
    twins = Twins(accelerator, CASES[name], adamw)
    for step in range(2):
        twins.backward(step)
        twins.step()
    twins.check()
    accelerator.free_memory()


def test_plans_and_pipelines_need_inputs():
    """A model that has to be divided, and cannot be called, is an error that says what to set."""
    for name in ("branching", "transposed"):
        model = CASES[name].build()
        for config in (MegatronConfig(tp=2, plan={"*": "colwise"}), MegatronConfig(tp=1, pp=2)):
            with pytest.raises(UsageError, match=r"set model\.example_inputs = "):
                inputs_for(config, model)
        assert inputs_for(MegatronConfig(tp=2), model) is None


def test_repeated_blocks_need_inputs():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(CASES["mlp"].build() for _ in range(2))

        def forward(self, left, right):
            return self.layers[0](left) + self.layers[1](right)

    with pytest.raises(UsageError, match=r"set model\.example_inputs = "):
        inputs_for(MegatronConfig(tp=2), Blocks())


def test_plan_for_what_cannot_be_tried():
    """A user's plan is kept or refused, with the reason."""
    model = CASES["mixed_dtypes"].build()
    named = users_plan(model, {"coarse": "colwise", "last": "rowwise"})
    ranks = SoloCommunicator(AXIS, Traffic(), timedelta(seconds=1))
    tensor = TensorParallel(ranks, sequence_parallel=False, named=named, strict=True)
    with pytest.raises(ConfigError, match=r"'coarse' to be colwise.*cannot be tried in fp64"):
        tensor.plan(model, inputs_for(MegatronConfig(tp=2), model))


class OneBlock(nn.Module):
    """Tokens come in, nothing repeats; the sizes of one layer are those of the vocabulary."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(22, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 22)
        self.dropout = dropout

    def forward(self, ids):
        x = self.tokens(ids)
        x = x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)
        return self.head(x)


@SEQUENCE
@pytest.mark.ranks(2)
def test_one_block_that_takes_tokens(sequence_parallel):
    """Its layers are divided in groups and by words; compiled, it trains the same."""
    for compiled in (False, True):
        torch.manual_seed(1)
        model = OneBlock().double()
        twin = copy.deepcopy(model)
        strategy = {"name": "megatron", "tp": 2, "sequence_parallel": sequence_parallel}
        accelerator = Accelerator(strategy=strategy, cpu=True)
        if compiled:
            model = torch.compile(model, backend="aot_eager")
        prepared = accelerator.prepare(model)
        facts = accelerator.strategy_of(prepared)._facts
        assert [name for name, known in facts.items() if known.partition is None] == ["down.bias"]
        ids = torch.arange(14).view(2, 7)
        losses = []
        for each in (prepared, twin):
            losses.append(F.cross_entropy(each(ids).flatten(0, 1), ids.flatten()))
        torch.testing.assert_close(losses[0].detach(), losses[1].detach(), rtol=1e-10, atol=0.0)
        accelerator.backward(losses[0])
        torch.autograd.backward(losses[1])
        inner = accelerator.unwrap_model(prepared, keep_torch_compile=False)
        rank = accelerator.mesh["tp"].rank
        for name, whole in twin.named_parameters():
            partition = facts[name].partition
            expected = whole.grad if partition is None else partition.take(whole.grad, rank)
            mine = inner.get_parameter(name).grad
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
        accelerator.free_memory()


@pytest.mark.ranks(2)
def test_random_numbers_of_a_model_without_inputs_are_those_of_the_cell():
    """Nothing is known of it, so whatever it draws must be equal on all ranks of a cell."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 6))

        def forward(self, x, scale):
            noise = torch.rand(6)
            return F.dropout(x @ self.weight, 0.5, self.training) * scale + noise

    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    model = accelerator.prepare(Noisy())
    torch.manual_seed(accelerator.process_index)
    outputs = [model(torch.ones(4, 6), 2.0) for _ in range(2)]
    assert not torch.equal(*outputs)
    for theirs in everyone([output.detach() for output in outputs]):
        for mine, other in zip(outputs, theirs, strict=True):
            assert torch.equal(mine, other)
    accelerator.free_memory()
