"""Optimizers, clips and their lists: over several models, over none, over what a group holds."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from stacks import Parts
from way_kit import WORDS, Loop, Words


def _clip(loop: Loop, parameters: object, most: float, kind: float = 2.0) -> Tensor:
    clip = nn.utils.clip_grad_norm_ if loop.alone else loop.accelerator.clip_grad_norm_
    return clip(parameters, most, kind)


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def one_optimizer_trains_two_models_and_a_criterion(loop: Loop) -> None:
    one, two = loop.model(), loop.model(3)
    # A criterion with a parameter, as CLIP's.
    criterion = Parts(
        lambda m, left, right: m.scale * (left * right).mean(), scale=nn.Parameter(torch.ones(()))
    )
    models: Sequence[nn.Module] = (one, two, criterion)
    groups = [
        {"params": list(one.parameters()), "lr": 0.02},
        {"params": [*two.parameters(), *criterion.parameters()], "weight_decay": 0.1},
    ]
    *models, optimizer = loop.prepare(*models, AdamW(groups, lr=0.01))
    one, two, criterion = models
    for step in range(3):
        batch = loop.batch(step)
        loop.backward(criterion(one(batch), two(batch)))
        loop.note(f"norm {step}", _clip(loop, [p for m in models for p in m.parameters()], 0.01))
        optimizer.step()
        optimizer.zero_grad()
    loop.weights(*models)


def one_optimizer_of_two_models_goes_on_from_a_checkpoint(loop: Loop) -> None:
    def made() -> tuple[nn.Module, nn.Module, Optimizer]:
        one, two = loop.model(), loop.model(3)
        both = [*one.parameters(), *two.parameters()]
        return loop.prepare(one, two, SGD(both, lr=0.5, momentum=0.9))

    one, two, optimizer = made()
    for step in range(4):
        if step == 2 and not loop.alone:
            folder = loop.folder() / "checkpoint"
            loop.accelerator.save_state(folder)
            loop.accelerator.free_memory()
            one, two, optimizer = made()
            loop.accelerator.load_state(folder)
        for model in (one, two):
            loop.backward(loop.loss(model, loop.batch(step)))
        loop.note(f"norm {step}", _clip(loop, [*one.parameters(), *two.parameters()], 0.01))
        optimizer.step()
        optimizer.zero_grad()
    loop.weights(one, two)


def nothing_is_clipped(loop: Loop) -> None:
    """As where a filter was exhausted by the optimizer."""
    model, optimizer = loop.ready()
    exhausted = filter(lambda parameter: parameter.requires_grad, model.parameters())
    list(exhausted)
    for step in loop.steps(model, optimizer):
        loop.note(f"norm {step}", _clip(loop, exhausted, 0.1))
        loop.note(f"norm of a list {step}", _clip(loop, [], 0.1))


def a_part_of_a_model_is_clipped(loop: Loop) -> None:
    """The ranks of a pipeline hold it, or have none of it."""
    model, optimizer = loop.ready()
    for step in loop.steps(model, optimizer):
        for name in ("first", "last"):
            part = getattr(model, name).parameters()
            loop.note(f"norm of {name} {step}", _clip(loop, part, 0.05))


def the_lists_of_an_optimizer_are_clipped(loop: Loop) -> None:
    model = loop.model()
    groups = [{"params": list(model.first.parameters())}, {"params": [*model.blocks.parameters()]}]
    groups.append({"params": list(model.last.parameters())})
    model, optimizer = loop.prepare(model, SGD(groups, lr=0.5))
    for step in loop.steps(model, optimizer):
        loop.note(f"largest {step}", _clip(loop, _held(optimizer), 1e9, float("inf")))
        for number, group in enumerate(optimizer.param_groups):
            loop.note(f"norm of {number} {step}", _clip(loop, group["params"], 0.05))
        loop.note(f"norm {step}", _clip(loop, _held(optimizer), 0.01))


def the_values_of_an_optimizers_lists_are_clipped(loop: Loop) -> None:
    model, optimizer = loop.ready()
    clip = nn.utils.clip_grad_value_ if loop.alone else None
    for _ in loop.steps(model, optimizer):
        clip = clip or loop.accelerator.clip_grad_value_
        clip(_held(optimizer), 1e-3)


def one_of_two_models_is_clipped(loop: Loop) -> None:
    one, two = loop.model(), loop.model(3)
    first, second = SGD(one.parameters(), lr=0.5), SGD(two.parameters(), lr=0.5)
    one, two, first, second = loop.prepare(one, two, first, second)
    for step in range(2):
        loop.backward(loop.loss(one, loop.batch(step)))
        loop.backward(loop.loss(two, loop.batch(step)))
        loop.note(f"norm {step}", _clip(loop, _held(second), 0.05))
        loop.note(f"norm of a part {step}", _clip(loop, one.last.parameters(), 0.05))
        loop.note(f"norm of nothing {step}", _clip(loop, iter(()), 0.05))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    loop.weights(one, two)


class _Judged(Words):
    """A model that leaves the part which judges it out of its parameters, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(WORDS, 1)

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:
        return [each for name, each in self.named_parameters() if not name.startswith("judge")]

    def forward(self, t: Tensor) -> Tensor:
        logits = super().forward(t)
        return logits * self.judge(logits).sigmoid()


def a_part_is_left_out_of_parameters(loop: Loop) -> None:
    """Ranks begin with other values of it, of which rank 0's count."""
    torch.manual_seed(0)
    model = _Judged()
    loop.begin()
    if not loop.alone and not loop.accelerator.is_main_process:
        nn.init.zeros_(model.judge.weight)
    optimizers = SGD(model.parameters(), lr=0.5), SGD(model.judge.parameters(), lr=0.1)
    model, *optimizers = loop.prepare(model, *optimizers)
    for step in range(3):
        loop.backward(loop.loss(model, loop.batch(step)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    loop.weights(model)
