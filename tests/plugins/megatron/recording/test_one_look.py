"""prepare() runs the user's forward once, whatever it plans; for layers, in evaluation, too."""

import functools
import threading

import pytest
import torch
from torch import nn

import huggingface_models
from cases import case
from drivetrain import Accelerator
from huggingface_models import llama

PP = {"pp": 2, "micro_batches": 2}


gpt2 = functools.partial(huggingface_models.gpt2, 4, dropout=0.1)


class Guessed(nn.Module):
    """Has no inputs of its own; the first guess is right."""

    def __init__(self):
        super().__init__()
        self.model = gpt2()

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


def forwards(build, **options):
    """Return how often prepare() runs a model's forward."""
    model, count = build(), []
    own = type(model).forward

    @functools.wraps(own)
    def forward(module, *args, **kwargs):
        if module is model:
            count.append(module.training)
        return own(module, *args, **kwargs)

    type(model).forward = forward
    try:
        accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    finally:
        type(model).forward = own
    return count


def once_for_reference(build):
    """Values and gradients that trials must reproduce come from the same run of a block.

    The trial of the whole model runs every block once more.
    """
    model, runs, thread = build(), [], threading.get_ident()
    blocks = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    own = type(blocks[0]).forward

    @functools.wraps(own)
    def forward(module, x, *args, **kwargs):
        if type(x) is torch.Tensor and threading.get_ident() == thread:  # trials have threads
            runs.append(torch.is_grad_enabled())
        return own(module, x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(blocks[0]), "forward", forward)
        accelerator = Accelerator(strategy={"name": "megatron", "tp": 2}, cpu=True)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert runs == [True] * (1 + len(blocks))


@pytest.mark.ranks(2)
def test_one_forward_in_each_mode_and_one_of_a_block_for_reference():
    for build, options in ((gpt2, {"tp": 2}), (llama, PP), (Guessed, {**PP, "cut": "profile"})):
        expected = [True, False] if "tp" in options else [True]
        assert forwards(build, **options) == expected, (build, options)
    for build in (gpt2, llama):
        with case(build):
            once_for_reference(build)


@pytest.mark.ranks(4)
def test_one_forward_for_both():
    assert forwards(Guessed, tp=2, **PP, cut="profile") == [True, False]
