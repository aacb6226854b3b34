"""Cells compute a language model's loss in pieces as one process computes it from logits."""

import copy
from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.errors import UsageError
from drivetrain.losses import DIVIDED, Classes, linear_cross_entropy
from drivetrain_megatron.pipeline.losses import TargetCounter, Weights
from drivetrain_megatron.plan.trial import run_emulated
from drivetrain_megatron.tensor.linear import attach_column, attach_row
from drivetrain_megatron.tensor.operators import Edges
from drivetrain_megatron.tensor.partition import even
from huggingface_models import VOCABULARY, WIDTH, gpt2, llama, token_batch
from staged_twins import compare_gradients

EXACT = {"rtol": 1e-12, "atol": 1e-12}
ROWS, TOKENS = 4, 10


class Logits(TorchDispatchMode):
    """Notes the most rows of a tensor whose last dim counts this many words."""

    def __init__(self, words):
        super().__init__()
        self.words, self.most = words, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            *rows, last = leaf.shape if isinstance(leaf, torch.Tensor) and leaf.dim() else (0,)
            if last == self.words and rows != [WIDTH]:  # the matrix
                self.most = max(self.most, prod(rows))
        return result


def batch(seed):
    """Return words and labels; every third batch is of TOKENS, others are longer."""
    ids = token_batch(seed, rows=ROWS, length=TOKENS + 2 * (seed % 3))
    return ids, ids.where(ids % 5 > 0, -100)


def whole_loss(model, ids, labels):
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Cell:
    """A model of a cell, and the same in one process."""

    def __init__(self, build, *, window=1, precision="no", **options):
        torch.manual_seed(0)
        model = build()
        self.window, self.twin = window, copy.deepcopy(model)
        self.accelerator = Accelerator(
            strategy={"name": "megatron", **options},
            gradient_accumulation_steps=window,
            mixed_precision=precision,
            config={"loss": "chunked"},
            cpu=True,
        )
        ids, labels = batch(0)
        given = {"input_ids": ids, "labels": labels, "use_cache": False}
        model.example_inputs = given
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.strategy = self.accelerator.strategy_of(self.model)
        self.other = torch.optim.SGD(self.twin.parameters(), lr=0.1)
        spec = ModelSpec.of(self.twin, states=0, inputs=((), given))
        self.cost = type(self.strategy).cost(self.strategy.config, spec, self.strategy.run)

    def backward(self, seed):
        """Run forward and backward of a window in both, and compare losses and gradients."""
        losses = []
        for micro in range(self.window):
            ids, labels = batch(self.window * seed + micro)
            with self.accelerator.accumulate(self.model):
                output = self.model(input_ids=ids, labels=labels, use_cache=False)
                assert output.logits is None
                self.accelerator.backward(output.loss)
            expected = whole_loss(self.twin, ids, labels)
            (expected / self.window).backward()
            losses.append((output.loss, expected))
        for found, expected in losses:
            assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        compare_gradients(self.model, self.twin, **EXACT)

    def step(self):
        for each in (self.optimizer, self.other):
            each.step()
            each.zero_grad()

    def check(self, steps=3):
        """Compare steps, the weights after them, logits without gradients, and bytes."""
        for seed in range(steps):
            self.backward(seed)
            self.step()
        state = self.accelerator.get_state_dict(self.model)
        torch.testing.assert_close(state, self.twin.state_dict(), **EXACT)
        ids, labels = batch(6)
        with torch.no_grad():
            logits = self.model(input_ids=ids, labels=labels, use_cache=False).logits
            expected = self.twin(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits + 0, expected, **EXACT)
        self.accelerator.traffic.clear()
        with self.accelerator.accumulate(self.model):
            output = self.model(input_ids=ids, labels=labels, use_cache=False)
            self.accelerator.backward(output.loss)
            self.optimizer.step()
        sent = {key: count for key, count in self.accelerator.traffic.sent().items() if count}
        if self.window == 1:
            assert sent == {key: count for key, count in self.cost.sent.items() if count}


@pytest.mark.parametrize(
    ("build", "options"),
    [(llama, {"tp": 2}), (gpt2, {"tp": 2}), (llama, {"tp": 2, "sequence_parallel": True})],
)
@pytest.mark.complete
@pytest.mark.ranks(2)
def test_divided_words(build, options):
    """The words are odd in number; the head's matrix is tied to the embedding's in one model."""
    cell = Cell(build, **options)
    cell.check()
    ids, labels = batch(9)
    with Logits(VOCABULARY - VOCABULARY // 2) as logits:  # of the last rank: others have WIDTH
        cell.accelerator.backward(cell.model(input_ids=ids, labels=labels, use_cache=False).loss)
    assert logits.most <= ROWS * TOKENS // 8
    assert logits.most > 1 or cell.accelerator.process_index == 0
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cell.model(input_ids=ids, labels=labels + VOCABULARY)


STAGES = [
    (llama, {}),
    (gpt2, {"schedule": "zb-h1"}),
    (llama, {"micro_batches": 1}),
    (gpt2, {"window": 2}),
]
OTHER_STAGES = [
    pytest.param(llama if build is gpt2 else gpt2, options, marks=pytest.mark.exhaustive)
    for build, options in STAGES
]


@pytest.mark.parametrize(("build", "options"), [*STAGES, *OTHER_STAGES])
@pytest.mark.complete
@pytest.mark.ranks(2)
def test_stages(build, options):
    """The last stage computes each micro-batch's loss, of unequal numbers of targets."""
    cell = Cell(build, pp=2, **options)
    cell.check()
    known = {} if options.keys() & {"micro_batches", "window"} else {Weights.TARGETS}
    assert {*cell.strategy.pipeline._losses._known.values()} == {*known}


@pytest.mark.ranks(2)
def test_stages_in_bf16():
    cell = Cell(lambda: llama().float(), pp=2, precision="bf16")
    for seed in range(2):
        ids, labels = batch(seed)
        loss = cell.model(input_ids=ids, labels=labels, use_cache=False).loss
        cell.accelerator.backward(loss)
        assert loss.item() == pytest.approx(whole_loss(cell.twin, ids, labels).item(), rel=1e-2)


@pytest.mark.ranks(4)
def test_stages_and_replicas_of_divided_words():
    cell = Cell(gpt2, pp=2, tp=2, sequence_parallel=True)
    cell.check()
    assert {*cell.strategy.pipeline._losses._known.values()} == {Weights.TARGETS}
    cell = Cell(llama, tp=2, data_parallel={"name": "zero3"})
    cell.check(1)


def test_each_option_where_ranks_divide_the_classes():
    torch.manual_seed(0)
    hidden, matrix = torch.randn(30, 6, dtype=torch.float64), torch.randn(11, 6).double()
    bias, weight, target = torch.randn(11).double(), torch.rand(11).double(), torch.arange(30) % 12
    options = {"ignore_index": 11, "weight": weight, "label_smoothing": 0.1, "z_loss": 0.3}

    def loss_and_gradients(own=slice(0, 11), classes=None):
        sides = [each.clone().requires_grad_() for each in (hidden, matrix[own], bias[own])]
        loss = linear_cross_entropy(
            *sides[:2], target, linear_bias=sides[2], classes=classes, **options
        )
        return loss.detach(), *torch.autograd.grad(2 * loss, sides)

    def of_rank(ranks):
        ((start, stop),) = even(0, 11, 3).ranges[ranks.rank]
        return loss_and_gradients(slice(start, stop), Classes(start, 11, ranks))

    loss, to_hidden, *to_words = loss_and_gradients()
    found = run_emulated(3, of_rank)
    for each in found:
        torch.testing.assert_close(each[:2], (loss, to_hidden), **EXACT)
    for words, shares in zip(
        to_words, zip(*(each[2:] for each in found), strict=True), strict=True
    ):
        torch.testing.assert_close(torch.cat(shares), words, **EXACT)
    large = torch.tensor([[1000.0]])
    for log in run_emulated(3, lambda ranks: Classes(0, 3, ranks).log_sum(large)):
        torch.testing.assert_close(log, large + torch.tensor(3.0).log())


def test_heads_that_cannot_be_computed_in_pieces():
    """One of three ranks has none of two words; a head cut by features has parts of all logits."""

    def loss(ranks, attach, *cut, **options):
        head = nn.Linear(6, 2)
        attach(head, Edges(ranks), even(-1, *cut, 3), **options)
        getattr(head, DIVIDED)(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))

    with pytest.raises(UsageError, match=r"found ranks with \(0, 1, 1\)"):
        run_emulated(3, lambda ranks: loss(ranks, attach_column, 2, logits=True))
    with pytest.raises(UsageError, match="divided by features"):
        run_emulated(3, lambda ranks: loss(ranks, attach_row, 6))


@pytest.mark.parametrize(("ignored", "varies"), [(-100, False), (0, True)])
def test_targets_from_zero_on_that_are_ignored_vary(ignored, varies):
    counter, targets = TargetCounter(), torch.tensor([0, 1, 2])
    with counter:
        F.cross_entropy(torch.eye(3), targets, ignore_index=ignored)
    assert counter.varies is varies
    assert counter.counts == [float((targets != ignored).sum())]
