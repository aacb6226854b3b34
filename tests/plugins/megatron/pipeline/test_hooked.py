"""Tensors that hooks collect inside of blocks, for a loss after them: stages equal one process."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.testing.conformance.twins import everyone
from drivetrain_megatron.recording.hooked import SeenCall, facts_of_calls
from mixture_models import FAMILIES, LABELED, LoopedExperts, huggingface

WIDTH, ROWS = 32, 4


class Balanced(nn.Module):
    """Blocks whose routers' logits make a further loss of the whole batch, if asked for."""

    def __init__(self, experts=18):
        super().__init__()
        self.blocks = nn.ModuleList(LoopedExperts(experts) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, balanced=True):
        logits = Collector.begin()
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(self.head(x), torch.ones_like(x[..., :3]))
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


def collect(model):
    for block in model.blocks:
        block.router.register_forward_hook(Collector())
    return model


def numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 3, WIDTH, generator=generator, dtype=torch.float64)


def train(twin, model, optimizers, accelerator, **options):
    for seed in range(3):
        expected, found = twin(numbers(seed), **options), model(numbers(seed), **options)
        expected["loss"].backward()
        accelerator.backward(found["loss"])
        torch.testing.assert_close(found["loss"].detach(), expected["loss"].detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


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
    torch.manual_seed(0)
    model = Balanced().double()
    twin = collect(copy.deepcopy(model))
    model.example_inputs = {"x": numbers(9), "balanced": asked_in == "prepare"}
    collect(model)
    accelerator = Accelerator(strategy={"name": "megatron", "pp": 2, **options}, cpu=True)
    adamw = {"lr": 0.01, "weight_decay": 0.5}  # an expert without tokens does not decay
    lone = torch.optim.AdamW(twin.parameters(), **adamw)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **adamw))
    train(twin, model, (lone, optimizer), accelerator)
    train(twin, model, (lone, optimizer), accelerator, balanced=False)
    state = accelerator.get_state_dict(model)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(model(numbers(5)), twin(numbers(5)), rtol=1e-9, atol=1e-10)
    everyone(None)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_a_loss_outside_of_the_model_takes_router_logits_of_an_early_stage():
    torch.manual_seed(0)
    model = collect(Balanced().double())
    model.example_inputs = numbers(9)
    twin = copy.deepcopy(model)
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 2}, cpu=True, gradient_accumulation_steps=2
    )
    model = accelerator.prepare(model)
    for seed in range(2):
        expected = twin(numbers(seed))
        ((expected["loss"] + expected["first"].square().mean()) / 2).backward()
        with accelerator.accumulate(model):
            found = model(numbers(seed))
            accelerator.backward(found["loss"] + found["first"].square().mean())
    whole = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad, rtol=1e-9, atol=1e-10)
    everyone(None)
    accelerator.free_memory()


OTHER_FAMILIES = {
    "qwen2_moe": ("Qwen2Moe", {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8}),
    "olmoe": ("Olmoe", {}),
}


@pytest.mark.parametrize(
    ("name", "asked_in"),
    [
        ("mixtral", "prepare"),
        pytest.param("mixtral", "call", marks=pytest.mark.exhaustive),
        *(pytest.param(name, "prepare", marks=pytest.mark.exhaustive) for name in OTHER_FAMILIES),
    ],
)
@pytest.mark.ranks(2)
def test_auxiliary_losses_of_hugging_face(name, asked_in, monkeypatch):
    check_auxiliary(name, asked_in, {"pp": 2, "micro_batches": 2}, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_auxiliary_losses_in_stages_that_ranks_share(monkeypatch):
    check_auxiliary("mixtral", "prepare", {"tp": 2, "pp": 2, "micro_batches": 2}, monkeypatch)


def check_auxiliary(name, asked_in, cell, monkeypatch):
    own = {"num_experts": 4, "moe_intermediate_size": 16, "output_router_logits": True}
    for other, (family, options) in OTHER_FAMILIES.items():
        monkeypatch.setitem(FAMILIES, other, (family, {**own, **options}))
    torch.manual_seed(0)
    model = huggingface(name)
    model.config.output_router_logits = asked_in == "prepare"
    model.router_aux_loss_coef = 3.0
    twin = copy.deepcopy(model)
    asked = {} if asked_in == "prepare" else {"output_router_logits": True}
    accelerator = Accelerator(strategy={"name": "megatron", **cell}, cpu=True)
    lone = torch.optim.SGD(twin.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        expected, found = twin(**LABELED, **asked), model(**LABELED, **asked)
        expected.loss.backward()
        accelerator.backward(found.loss)
        torch.testing.assert_close(found.loss.detach(), expected.loss.detach(), rtol=1e-7, atol=0)
        for each in (lone, optimizer):
            each.step()
            each.zero_grad()
    state = accelerator.get_state_dict(model)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-7, atol=1e-7)
    with torch.no_grad():
        expected, found = twin(**LABELED, **asked), model(**LABELED, **asked)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, rtol=1e-7, atol=0)
    # Routers compute in fp32, whose rounding two steps have brought into the weights.
    torch.testing.assert_close(found.router_logits, expected.router_logits, rtol=1e-5, atol=1e-5)
    everyone(None)
    accelerator.free_memory()
