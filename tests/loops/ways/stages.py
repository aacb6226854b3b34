"""Models: what a call returns, what it leaves in buffers, and what stands under a model's names."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from stacks import Residual
from way_kit import LENGTH, WIDTH, WORDS, Loop, WayBlock, Words


class _Returning(Words):
    """Returns its loss, and what it was made of; without targets no loss."""

    def forward(self, t: Tensor, targets: Tensor | None = None) -> dict[str, Any]:
        x = self.body(self.first(t))
        logits = self.last(x)
        scores = logits.logsumexp(-1).mean(-1)
        found = {"logits": logits, "hidden": [x, {"last": x[:, -1]}], "scores": scores}
        if targets is not None:
            found["loss"] = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {**found, "mean": scores.mean()}


class _Hitting(_Returning):
    """Counts hits, too."""

    def forward(self, t: Tensor, targets: Tensor | None = None) -> dict[str, Any]:
        found = super().forward(t, targets)
        return {**found, "hits": (found["logits"].argmax(-1) == t).sum()}


class _Counting(Residual):
    """Counts its calls and rows, and averages what it gets."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.average.lerp_(x.detach().mean((0, 1)), 0.1)
        return super().forward(x)


class _Around(_Returning):
    """Counts around the blocks; has a norm there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.norm = nn.BatchNorm1d(LENGTH, momentum=None)
        self.first = nn.Sequential(self.first, self.norm)
        self.number = 0

    def forward(self, t: Tensor, targets: Tensor | None = None) -> dict[str, Any]:
        self.calls += 1
        self.number += 1
        return super().forward(t, targets)


def _normed() -> nn.Module:
    """Return a block that has a norm which averages all batches alike."""
    return WayBlock(norm=lambda width: nn.BatchNorm1d(LENGTH, momentum=None))


def _ready(loop: Loop, model: nn.Module) -> tuple[nn.Module, Any]:
    return loop.prepare(model, SGD(model.parameters(), lr=0.5))


def _made(kind: type[nn.Module], block: Callable[[], nn.Module] = WayBlock) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    model.blocks = nn.ModuleList(block() for _ in range(2))
    return model


# --- outputs ---


def loss_of_what_comes_beside_the_loss(loop: Loop) -> None:
    model, optimizer = _ready(loop, _made(_Returning))
    for step in range(2):
        found = model(t := loop.batch(step), t)
        assert found["logits"].shape == (*t.shape, WORDS)
        assert found["hidden"][1]["last"].shape == (len(t), WIDTH)
        loop.step(optimizer, found["loss"] + found["logits"].square().mean())
    loop.weights(model)


def loss_of_outputs_without_a_loss(loop: Loop) -> None:
    model, optimizer = _ready(loop, _made(_Returning))
    for step, rows in enumerate((8, 6, 2)):
        found = model(loop.batch(step, rows))
        loop.step(optimizer, found["logits"].square().mean() + found["mean"])
    loop.weights(model)


def outputs_of_an_evaluation(loop: Loop) -> None:
    model, _ = _ready(loop, _made(_Hitting))
    model.eval()
    with torch.no_grad():
        for rows in (8, 6, 2):
            t = torch.arange(rows * LENGTH).view(rows, LENGTH) % WORDS
            found = model(t, t)
            for name in ("logits", "scores", "loss", "mean", "hits"):
                loop.note(f"{name} of {rows}", found[name])
            loop.note(f"hidden of {rows}", found["hidden"][1]["last"])


def loss_divided_in_place(loop: Loop) -> None:
    model, optimizer = _ready(loop, _made(_Returning))
    for step in range(2):
        loss = model(t := loop.batch(step), t)["loss"]
        loss *= 0.5
        loop.step(optimizer, loss)
    loop.weights(model)


def two_forwards_before_a_backward(loop: Loop) -> None:
    model, optimizer = _ready(loop, _made(_Returning))
    for step in range(2):
        one, other = model(loop.batch(step))["logits"], model(loop.batch(9))["logits"]
        loop.step(optimizer, (one - other).square().mean())
    loop.weights(model)


def evaluation_before_the_backward(loop: Loop) -> None:
    model, optimizer = _ready(loop, _made(_Returning, _normed))
    t = torch.arange(8 * LENGTH).view(8, LENGTH) % WORDS
    for _ in range(2):
        loss = model(t, t)["loss"]
        model.eval()
        with torch.no_grad():
            model(t, t)
        model.train()
        loop.step(optimizer, loss)
    loop.weights(model)


# --- buffers; ranks with batches of their own have averages of their own, so all get one batch ---


def _train_with_buffers(loop: Loop, model: nn.Module) -> None:
    model, optimizer = _ready(loop, model)
    t = torch.arange(8 * LENGTH).view(8, LENGTH)
    for step in range(2):
        loop.step(optimizer, model(t % (step + 7), t % WORDS)["loss"])
        loop.step(optimizer, model(t % (step + 5))["logits"].square().mean())
    with torch.no_grad():  # as statistics are made anew after training
        model(t % 11, t % WORDS)
        model.eval()
        model(t % 3, t % WORDS)
    loop.weights(model)


def counts_and_averages_in_blocks(loop: Loop) -> None:
    _train_with_buffers(loop, _made(_Returning, _Counting))


def averages_by_count_in_blocks(loop: Loop) -> None:
    _train_with_buffers(loop, _made(_Returning, _normed))


def counts_around_blocks(loop: Loop) -> None:
    model = _made(_Around)
    _train_with_buffers(loop, model)
    loop.note("number", float(model.number))


# --- names ---


def parameters_are_listed(loop: Loop) -> None:
    model, optimizer = loop.ready()
    loop.train(model, optimizer, 2)
    loop.note("elements", float(sum(p.numel() for p in model.parameters())))
    for name, parameter in model.named_parameters():
        loop.note(name, torch.tensor(parameter.shape))


def buffers_are_listed(loop: Loop) -> None:
    model, _ = _ready(loop, _made(_Around, _normed))
    for name, buffer in model.named_buffers():
        loop.note(name, torch.tensor(buffer.shape))


def buffers_are_averaged(loop: Loop) -> None:
    """As an average of a model follows its buffers."""
    model = _made(_Returning, _normed)
    averages = copy.deepcopy(model)
    model, optimizer = _ready(loop, model)
    t = torch.arange(8 * LENGTH).view(8, LENGTH)
    for step in range(2):
        loop.step(optimizer, model(t % (step + 7), t % WORDS)["loss"])
        for average, buffer in zip(averages.buffers(), model.buffers(), strict=True):
            average.copy_(buffer)
    for name, average in averages.named_buffers():
        loop.note(name, average)


def state_dict_of_the_model(loop: Loop) -> None:
    model, optimizer = loop.ready()
    loop.train(model, optimizer, 2)
    for name, value in model.state_dict().items():
        loop.note(name, value)


def load_state_dict_between_steps(loop: Loop) -> None:
    model, optimizer = loop.ready()
    other = Words()
    other.load_state_dict({n: torch.full_like(p, 0.1) for n, p in other.state_dict().items()})
    loop.step(optimizer, loop.loss(model, loop.batch(0)))
    model.load_state_dict(other.state_dict())
    loop.step(optimizer, loop.loss(model, loop.batch(1)))
    loop.weights(model)


def noise_on_parameters(loop: Loop) -> None:
    model, optimizer = loop.ready()
    loop.step(optimizer, loop.loss(model, loop.batch(0)))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    loop.step(optimizer, loop.loss(model, loop.batch(1)))
    loop.weights(model)


def adapters_are_switched_off(loop: Loop) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    config = LoraConfig(r=2, target_modules=["up"], modules_to_save=["last"])
    model = loop.model()
    torch.manual_seed(1)
    model = get_peft_model(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = loop.prepare(model, SGD(trained, lr=0.5))
    for step in range(2):
        t = loop.batch(step)
        with torch.no_grad(), model.disable_adapter():
            before = model(x=t)
        loop.step(optimizer, (model(x=t) - before - 1).square().mean())
    for name, value in get_peft_model_state_dict(model).items():
        loop.note(name, value)
