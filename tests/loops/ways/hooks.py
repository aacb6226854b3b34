"""Hooks: on parameters, registered before and after prepare, that change, record and step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD

from way_kit import Loop, hooked


def a_hook_of_before_clamps(loop: Loop) -> None:
    hooked(loop, lambda g: g.clamp(-0.01, 0.01), before=True)


def a_hook_of_after_clamps(loop: Loop) -> None:
    hooked(loop, lambda g: g.clamp(-0.01, 0.01), before=False)


def a_hook_scales(loop: Loop) -> None:
    hooked(loop, lambda g: g * 0.5, before=True)


def a_hook_clips_its_own_norm(loop: Loop) -> None:
    hooked(loop, lambda g: g / (1 + g.norm()), before=True)


def a_hook_records_norms(loop: Loop) -> None:
    norms: list[Tensor] = []
    hooked(loop, lambda g: norms.append(g.norm().clone()), before=True)
    loop.note("norms", torch.stack(norms).sort().values)


def a_hook_is_removed_after_a_step(loop: Loop) -> None:
    model, optimizer = loop.ready()
    handle = model.last.weight.register_hook(lambda g: g * 0)
    for step in range(3):
        loop.step(optimizer, loop.loss(model, loop.batch(step)))
        if step == 1:
            handle.remove()
    loop.weights(model)


def a_hook_in_windows(loop: Loop) -> None:
    """It gets the gradient of the window, as one batch as large would give it."""
    loop.begin(gradient_accumulation_steps=2)
    model = loop.model()
    model.first.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    model, optimizer = loop.prepare(model, SGD(model.parameters(), lr=0.5))
    model.last.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    for step in range(2):
        parts = [loop.batch(2 * step), loop.batch(2 * step + 1)]
        if loop.alone:
            loop.step(optimizer, sum(loop.loss(model, part) for part in parts) / 2)
            continue
        for part in parts:
            with loop.accumulate(model):
                loop.step(optimizer, loop.loss(model, part))
    loop.weights(model)


def a_hook_and_two_backwards(loop: Loop) -> None:
    model, optimizer = loop.ready()
    model.last.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    for step in loop.steps(model, optimizer):
        loop.backward(loop.loss(model, loop.batch(step + 7)))


def a_hook_after_accumulation_scales(loop: Loop) -> None:

    def halve(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(0.5)

    def clamp(parameter: nn.Parameter) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    model = loop.model()
    model.first.weight.register_post_accumulate_grad_hook(halve)
    model, optimizer = loop.prepare(model, SGD(model.parameters(), lr=0.5))
    model.last.weight.register_post_accumulate_grad_hook(clamp)
    loop.train(model, optimizer)


def an_optimizer_in_backward(loop: Loop) -> None:
    """Each parameter is stepped by a hook as soon as its gradient is there."""
    model = loop.model()
    rates = {id(p): 0.1 * (i + 1) for i, p in enumerate(model.parameters())}
    model, _ = loop.prepare(model, SGD(model.parameters(), lr=0.5))

    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad * rates[id(parameter)])
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loop.backward(loop.loss(model, loop.batch(number)))
    loop.weights(model)


def blocks_scale_gradients_in_hooks(loop: Loop) -> None:
    """Full backward hooks of torch, on every block."""
    model, optimizer = loop.ready()
    for block in model.blocks:
        block.register_full_backward_hook(lambda _, given, __: (given[0] * 1.5, *given[1:]))
    loop.train(model, optimizer)


def a_forward_keeps_its_block(loop: Loop) -> None:
    """A function in the place of a forward, as patches of models put it there."""
    model = loop.model()
    for block in model.blocks:
        block.forward = _doubled(block.forward)
    loop.train(*loop.prepare(model, SGD(model.parameters(), lr=0.5)))


def _doubled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda hidden: 2 * forward(hidden)
