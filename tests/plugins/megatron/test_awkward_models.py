"""Awkward models under tensor parallelism: what is said of them, and what cannot be divided."""

import copy
import itertools
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cell_twins import loss_of
from divided_words import planned, planned_and_described
from drivetrain import Accelerator
from drivetrain.errors import ConfigError, UsageError
from drivetrain.testing.conformance.suite import Twins, adamw, everyone
from drivetrain.testing.models import CASES
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.plan import model as plan_model
from drivetrain_megatron.recording.calls import inputs_for
from emulated_tensors import close
from stacks import Parts, words

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


def test_reports():
    """What stays whole has its bytes in the report, and the reason if there is more to say."""
    for name, sharded in itertools.product(NAMES, (False, True)):
        _, text = planned_and_described(CASES[name].build(), sequence_parallel=sharded)
        is_whole = ": 0 of " in text and "100.0% of the bytes stay whole" in text
        assert is_whole == (name in WHOLE), name
        assert WHOLE.get(name, "whole on each rank: ") in text
        assert ("by words: embedding, head" in text) == (name == "tied"), name


@pytest.mark.ranks(2)
def test_dividing_nothing_is_a_warning():
    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    with mock.patch.object(plan_model.logger, "warning") as warning:
        accelerator.prepare(CASES["batchnorm"].build())
    (line,) = warning.call_args.args
    assert line.endswith("set tp to 1, and the ranks share the samples instead")


@pytest.mark.parametrize("name", NAMES)
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


def test_plans_pipelines_and_repeated_blocks_need_inputs():
    """A model that has to be divided, and cannot be called, is an error that says what to set."""
    blocks = Parts(
        lambda model, left, right: model.layers[0](left) + model.layers[1](right),
        layers=nn.ModuleList(CASES["mlp"].build() for _ in range(2)),
    )
    tp, pp = MegatronConfig(tp=2), MegatronConfig(tp=1, pp=2)
    models = [CASES[name].build() for name in ("branching", "transposed")]
    needed = itertools.product((MegatronConfig(tp=2, plan={"*": "colwise"}), pp), models)
    for config, model in (*needed, (tp, blocks)):
        with pytest.raises(UsageError, match=r"set model\.example_inputs = "):
            inputs_for(config, model)
    assert all(inputs_for(tp, model) is None for model in models)


def test_plan_for_what_cannot_be_tried():
    """A user's plan is kept or refused, with the reason."""
    plan = {"coarse": "colwise", "last": "rowwise"}
    with pytest.raises(ConfigError, match=r"'coarse' to be colwise.*cannot be tried in fp64"):
        planned(CASES["mixed_dtypes"].build(), plan=plan)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "shards"])
@pytest.mark.ranks(2)
def test_one_block_that_takes_tokens(sequence_parallel):
    """Its layers are divided in groups and by words; compiled, it trains the same.

    The sizes of one layer are those of the vocabulary.
    """
    for compiled in (False, True):
        torch.manual_seed(1)
        model = words(22, 8, 12, blocks=1, act=nn.GELU).double()
        twin = copy.deepcopy(model)
        strategy = {"name": "megatron", "tp": 2, "sequence_parallel": sequence_parallel}
        accelerator = Accelerator(strategy=strategy, cpu=True)
        if compiled:
            model = torch.compile(model, backend="aot_eager")
        prepared = accelerator.prepare(model)
        facts = accelerator.strategy_of(prepared)._facts
        assert [name for name, known in facts.items() if known.partition is None] == [
            "blocks.0.down.bias"
        ]
        ids = torch.arange(14).view(2, 7)
        loss, expected = loss_of(prepared, ids), loss_of(twin, ids)
        close(loss.detach(), expected.detach())
        accelerator.backward(loss)
        expected.backward()
        inner = accelerator.unwrap_model(prepared, keep_torch_compile=False)
        for name, whole in twin.named_parameters():
            close(inner.get_parameter(name).grad, whole.grad)


@pytest.mark.ranks(2)
def test_random_numbers_of_a_model_without_inputs_are_those_of_the_cell():
    """Nothing is known of it, so whatever it draws must be equal on all ranks of a cell."""

    def noisy(model, x, scale):
        noise = torch.rand(6)
        return F.dropout(x @ model.weight, 0.5, model.training) * scale + noise

    accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
    model = accelerator.prepare(Parts(noisy, weight=nn.Parameter(torch.ones(6, 6))))
    torch.manual_seed(accelerator.process_index)
    outputs = [model(torch.ones(4, 6), 2.0) for _ in range(2)]
    assert not torch.equal(*outputs)
    for theirs in everyone([output.detach() for output in outputs]):
        torch.testing.assert_close([*outputs], [*theirs], rtol=0, atol=0)
