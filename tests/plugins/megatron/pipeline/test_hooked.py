"""Tensors that hooks collect inside of blocks, for a loss after them: stages equal one process."""

import itertools
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain_megatron.recording.shapes import SeenCall, facts_of_calls
from mixture_models import LABELED, LoopedExperts, huggingface
from stacks import Stack
from staged_twins import Twins

WIDTH, ROWS = 32, 4


class Balanced(Stack):
    """Blocks whose routers' logits make a further loss of the whole batch, if asked for."""

    def __init__(self, experts=18):
        super().__init__((LoopedExperts(experts) for _ in range(4)), last=nn.Linear(WIDTH, 3))

    def forward(self, x, balanced=True):
        logits = Collector.begin()
        loss = F.mse_loss(super().forward(x), torch.ones_like(x[..., :3]))
        if not balanced:
            return {"loss": loss}
        assert len(logits) == len(self.blocks)
        shares = torch.stack(logits).softmax(-1).mean((0, 1, 2))
        return {"loss": loss + 3 * shares.square().sum(), "shares": shares, "first": logits[0]}


class Collector:
    """A hook that keeps results, in a list that belongs to one forward."""

    found: ClassVar = []

    @classmethod
    def begin(cls):
        cls.found = []
        return cls.found

    def __call__(self, module, args, result):
        Collector.found.append(result)


def balanced():
    torch.manual_seed(0)
    model = Balanced().double()
    for block in model.blocks:
        block.router.register_forward_hook(Collector())
    return model


def numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 3, WIDTH, generator=generator, dtype=torch.float64)


def test_tensors_for_hooks_follow_one_another_behind_the_result_of_the_block():
    results = [(torch.ones(2), None, torch.ones(3)), {"x": torch.ones(4)}]
    calls = [SeenCall(name, ((), {}), each) for name, each in zip("ab", results, strict=True)]
    found = facts_of_calls(calls, first=1)
    assert [(call.name, *call.leaves) for call in found] == [("a", 1, 2), ("b", 3)]
    assert [meta.shape for call in found for meta in call.metas] == [(2,), (3,), (4,)]


@pytest.mark.parametrize("asked_in", ["prepare", "call"])
@pytest.mark.parametrize("options", [{"micro_batches": 1}, {"micro_batches": 2}, {"cut": "1,3"}])
@pytest.mark.ranks(2)
def test_router_logits_cross_the_cut(options, asked_in):
    adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    example = {"x": numbers(9), "balanced": asked_in == "prepare"}
    both = Twins(balanced(), example, make=adamw, **options)
    for asked, seed in itertools.product((True, False), range(3)):
        both.backward(*(each["loss"] for each in both(numbers(seed), balanced=asked)), rtol=1e-7)
        both.step()  # an expert without tokens does not decay
    both.check_state(rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(*both(numbers(5)), rtol=1e-9, atol=1e-10)


@pytest.mark.ranks(2)
def test_a_loss_outside_of_the_model_takes_router_logits_of_an_early_stage():
    both = Twins(balanced(), numbers(9), accumulation=2)
    for seed in range(2):
        with both.accelerator.accumulate(both.model):
            outputs = both(numbers(seed))
            both.backward(*(each["loss"] + each["first"].square().mean() for each in outputs))
    both.check_gradients(rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("asked_in", "cell"),
    [
        pytest.param("prepare", {"pp": 2}, marks=pytest.mark.ranks(2)),
        pytest.param("call", {"pp": 2}, marks=[pytest.mark.ranks(2), pytest.mark.exhaustive]),
        pytest.param(
            "prepare", {"tp": 2, "pp": 2}, marks=[pytest.mark.ranks(4), pytest.mark.exhaustive]
        ),
    ],
)
def test_auxiliary_losses_of_hugging_face(asked_in, cell):
    model = huggingface("mixtral")
    model.config.output_router_logits = asked_in == "prepare"
    model.router_aux_loss_coef = 3.0
    asked = {} if asked_in == "prepare" else {"output_router_logits": True}
    both = Twins(model, make=partial(torch.optim.SGD, lr=0.1), micro_batches=2, **cell)
    for _ in range(2):
        both.backward(*(each.loss for each in both(**LABELED, **asked)), rtol=1e-7)
        both.step()
    both.check_state(rtol=1e-7, atol=1e-7)
    with torch.no_grad():
        found, expected = both(**LABELED, **asked)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, rtol=1e-7, atol=0)
    # Routers compute in fp32, whose rounding two steps have brought into the weights.
    torch.testing.assert_close(found.router_logits, expected.router_logits, rtol=1e-5, atol=1e-5)
