"""Tensor parallelism of whole models: losses, gradients and steps equal those of one process."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch

from cases import case
from cell_twins import Twins
from huggingface_models import ARCHITECTURES, token_batch

ROOT = Path(__file__).parents[3]


def example_gpt(layers=2):
    """Return the GPT of the example as it stands."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples/train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(48, layers, 6, 32).double()


MODELS = {**ARCHITECTURES, "example": example_gpt}
NAMES = ("llama-mqa", "gpt2", "example", "neox", "bert", "encoder")


def check_training(name, **options):
    torch.manual_seed(0)
    both = Twins(MODELS[name](), optimizer=partial(torch.optim.SGD, momentum=0.9), **options)
    replicas = both.accelerator.mesh["dp"].size
    for step in range(2):
        both.backward(*(token_batch(replicas * step + rank) for rank in range(replicas)))
        both.clip(0.5)
        if "data_parallel" not in options:
            both.check_gradients()
        both.step()
    both.check_weights()
    both.close()


@pytest.mark.ranks(2)
def test_two_ranks():
    for number, name in enumerate(NAMES):
        with case(name):
            check_training(name, tp=2, sequence_parallel=number % 2 == 1)


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_four_ranks():
    for name, options in (
        ("llama-mqa", {"tp": 4}),
        ("gpt2", {"tp": 4, "sequence_parallel": True}),
        ("llama-gqa", {"tp": 2, "data_parallel": {"name": "zero2"}}),
    ):
        with case(name, options):
            check_training(name, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("inner", ["ddp", "zero1", "zero3", "fsdp"])
@pytest.mark.ranks(4)
def test_over_data_parallel_ranks(inner):
    check_training("gpt2", tp=2, data_parallel={"name": inner})
