"""A rank that fails in a pipeline: the others end soon, and say where they were."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import Accelerator
from drivetrain.errors import CollectiveError, ConfigError, UsageError
from drivetrain.testing.conformance.tcp import cut_connections
from huggingface_models import VOCABULARY, gpt2, logits_of, token_batch

TIMEOUT_S = 3600.0  # far beyond a test's own limit: a rank that waits for it fails its test


def loss_of(output, targets):
    return F.cross_entropy(logits_of(output).view(-1, VOCABULARY), targets.view(-1))


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("loss", KeyboardInterrupt),
        ("forward", RuntimeError),
        pytest.param("connections", ConnectionError, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.ranks(3)
def test_a_stage_that_fails(place, kind):
    """By an exception, or as when its process is killed: all of its connections end."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        strategy={"name": "megatron", "pp": 3, "micro_batches": 3},
        config={"launch": {"timeout_s": TIMEOUT_S}},
        cpu=True,
    )
    model = accelerator.prepare(gpt2(3))
    rank = accelerator.mesh["pp"].rank
    odd = rank == (2 if place == "loss" else 1)
    ids = token_batch(0, rows=3)
    failing = []

    def fail(*_):
        if place == "connections":
            cut_connections()
        raise kind("sprung")

    def loss_or_fail(output, targets):
        return fail() if failing else loss_of(output, targets)

    accelerator.pipeline_step(model, ids, ids, loss_fn=loss_or_fail)
    if odd and place == "loss":
        failing.append(rank)
    elif odd:
        model.transformer.h[1].mlp.register_forward_hook(fail)
    with pytest.raises(kind if odd else CollectiveError) as caught:
        accelerator.pipeline_step(model, ids, ids, loss_fn=loss_or_fail)
    if not odd:
        assert "stage" in str(caught.value)
        assert "micro-batch" in str(caught.value)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_calls_and_models_that_do_not_fit():
    accelerator = Accelerator(strategy={"name": "megatron", "pp": 2}, cpu=True)
    with pytest.raises(ConfigError, match="between 1 and 1 stages for a model of 1 blocks"):
        accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    torch.manual_seed(0)
    model = accelerator.prepare(gpt2(2))
    ids = token_batch(0, rows=2)
    with pytest.raises(UsageError, match="expected a batch with rows"):
        model(ids[:0])
    output = model(input_ids=ids, labels=ids)
    with pytest.raises(UsageError, match="times numbers"):
        accelerator.backward(output.loss.square())
    accelerator.free_memory()
