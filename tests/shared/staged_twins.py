"""A model that is cut into stages, beside the same model in one process."""

import copy

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.model.modules import named_parameters
from drivetrain.testing.conformance.suite import everyone

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def compare_gradients(model, twin, **tolerance):
    """Compare the gradients that this rank holds of a model with those of one process."""
    found = {name: each.grad for name, each in named_parameters(model).items()}
    whole = {name: each.grad for name, each in twin.named_parameters() if name in found}
    torch.testing.assert_close(found, whole, **tolerance)


class Twins:
    """Two models, which are called together.

    Args:
        model: gets into two stages, where ``cell`` says nothing else.
        example: example inputs of the model.
        make: makes an optimizer of parameters, for each of both.
        accumulation: micro-batches of a window.
        compiles: which part of the model is compiled.
        cell: options of ``megatron``.
    """

    def __init__(self, model, example=None, *, make=None, accumulation=1, compiles="none", **cell):
        self.twin = copy.deepcopy(model)
        if example is not None:
            model.example_inputs = example
        self.accelerator = Accelerator(
            strategy={"name": "megatron", "pp": 2, **cell},
            gradient_accumulation_steps=accumulation,
            cpu=True,
            config={"compile": compiles},
        )
        self.optimizers, self._losses = [], []
        if make is None:
            self.model = self.accelerator.prepare(model)
        else:
            made = make(model.parameters())
            self.model, mine = self.accelerator.prepare(model, made)
            self.optimizers = [mine, make(self.twin.parameters())]

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs), self.twin(*args, **kwargs)

    @property
    def strategy(self):
        return self.accelerator.strategy_of(self.model)

    def eval(self):
        self.model.eval()
        self.twin.eval()

    def backward(self, found, expected, *, rtol=1e-10):
        """Run the backward of both losses; at the end of a window, all of its losses are equal."""
        (expected / self.accelerator.gradient_accumulation_steps).backward()
        self.accelerator.backward(found)
        self._losses.append((found, expected))
        if self.accelerator.sync_gradients:
            for mine, whole in self._losses:
                assert mine.item() == pytest.approx(whole.item(), rel=rtol)
            self._losses.clear()

    def check_gradients(self, **tolerance):
        """Compare the gradients of this rank's stages, and delete them."""
        compare_gradients(self.model, self.twin, **(tolerance or EXACT))
        self.model.zero_grad()
        self.twin.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check_state(self, **tolerance):
        state = self.accelerator.get_state_dict(self.model)
        torch.testing.assert_close(state, self.twin.state_dict(), **tolerance or EXACT)

    def close(self):
        everyone(None)
        self.accelerator.free_memory()
