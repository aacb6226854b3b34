"""Gradients between backward and step: cleared, kept from a step, assigned, edited, measured."""

from torch import nn

from loop import Loop


def gradients_are_cleared_by_none(loop: Loop) -> None:
    """As nanoGPT and many scripts clear."""
    model, optimizer = loop.ready()
    for step in range(3):
        loop.backward(loop.loss(model, loop.batch(step)))
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    loop.weights(model)


def a_layer_is_kept_from_a_step_by_none(loop: Loop) -> None:
    """As SwAV keeps its prototypes."""
    model, optimizer = loop.ready()
    for step in range(3):
        loop.backward(loop.loss(model, loop.batch(step)))
        if step < 2:
            for parameter in model.head.parameters():
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    loop.weights(model)


def torch_clips_by_norm(loop: Loop) -> None:
    model, optimizer = loop.ready()
    for step in range(3):
        loop.backward(loop.loss(model, loop.batch(step)))
        loop.note(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    loop.weights(model)
