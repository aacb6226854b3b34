"""Cells compute a language model's loss in pieces as one process computes it from logits."""

import copy
from math import prod

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec
from drivetrain.model.modules import named_parameters
from drivetrain.testing.conformance.accounts import sent_bytes
from drivetrain.testing.conformance.twins import everyone
from huggingface_models import VOCABULARY, WIDTH, gpt2, llama, token_batch

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
    ids = token_batch(seed, rows=ROWS, length=TOKENS)
    return ids, ids.where(ids % 5 > 0, -100)


def whole_loss(model, ids, labels):
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Cell:
    """A model of a cell, and the same in one process."""

    def __init__(self, build, *, accumulation=1, precision="no", **options):
        torch.manual_seed(0)
        model = build()
        self.twin = copy.deepcopy(model)
        self.accelerator = Accelerator(
            strategy={"name": "megatron", **options},
            gradient_accumulation_steps=accumulation,
            config={"loss": "chunked"},
            mixed_precision=precision,
            cpu=True,
        )
        ids, labels = batch(0)
        spec = {"input_ids": ids, "labels": labels, "use_cache": False}
        model.example_inputs = spec
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.other = torch.optim.SGD(self.twin.parameters(), lr=0.1)
        self.spec = ModelSpec.of(copy.deepcopy(self.twin), states=0, inputs=((), spec))

    def step(self, seed):
        """Take a step in both, and compare losses and gradients before it."""
        ids, labels = batch(seed)
        output = self.model(input_ids=ids, labels=labels, use_cache=False)
        assert output.logits is None
        self.accelerator.backward(output.loss)
        expected = whole_loss(self.twin, ids, labels)
        expected.backward()
        assert output.loss.item() == pytest.approx(expected.item(), rel=1e-12)
        wanted = dict(self.twin.named_parameters())
        for name, parameter in named_parameters(self.model).items():
            torch.testing.assert_close(
                parameter.grad, wanted[name].grad, **EXACT, msg=lambda text, n=name: f"{n}: {text}"
            )
        for each in (self.optimizer, self.other):
            each.step()
            each.zero_grad()

    def check(self, steps=3):
        for seed in range(steps):
            self.step(seed)
        state = self.accelerator.get_state_dict(self.model)
        for name, value in self.twin.state_dict().items():
            torch.testing.assert_close(state[name], value, **EXACT)
        ids, labels = batch(7)
        self.model.eval()
        self.twin.eval()
        with torch.no_grad():
            logits = self.model(input_ids=ids, labels=labels, use_cache=False).logits
            expected = self.twin(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits + 0, expected, **EXACT)
        self.model.train()

    def close(self):
        everyone(None)
        self.accelerator.free_memory()


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (llama, {"tp": 2}),
        (gpt2, {"tp": 2}),
        (llama, {"tp": 2, "sequence_parallel": True}),
    ],
)
@pytest.mark.complete
@pytest.mark.ranks(2)
def test_divided_words(build, options):
    """The words are odd in number; the head's matrix is tied to the embedding's in one model."""
    cell = Cell(build, **options)
    cell.check()
    ids, labels = batch(9)
    cell.accelerator.traffic.clear()
    with Logits(VOCABULARY - VOCABULARY // 2) as logits:  # of the last rank
        output = cell.model(input_ids=ids, labels=labels, use_cache=False)
        cell.accelerator.backward(output.loss)
    assert logits.most <= ROWS * TOKENS // 8
    assert logits.most > 1 or cell.accelerator.process_index == 0  # whose words are as many as WIDTH
    cell.optimizer.step()
    strategy = cell.accelerator.strategy_of(cell.model)
    cost = type(strategy).cost(strategy.config, cell.spec, strategy.run)
    sent = {key: count for key, count in cell.accelerator.traffic.sent().items() if count}
    assert sent == {key: count for key, count in cost.sent.items() if count}
    cell.close()


@pytest.mark.parametrize(
    "options",
    [{"pp": 2}, {"pp": 2, "schedule": "zb-h1"}, {"pp": 2, "micro_batches": 1}],
)
@pytest.mark.complete
@pytest.mark.ranks(2)
def test_stages(options):
    """The last stage computes each micro-batch's loss, of unequal numbers of targets."""
    for build in (llama, gpt2):
        cell = Cell(build, **options)
        cell.check()
        cell.close()


@pytest.mark.ranks(4)
def test_stages_of_divided_words():
    cell = Cell(gpt2, pp=2, tp=2)
    cell.check()
    cell.close()
