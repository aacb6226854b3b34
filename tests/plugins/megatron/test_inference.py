"""Evaluation over shares of layers and stages: before training, in between, and around a step."""

import pytest
import torch

from cases import case
from cell_twins import EXACT, Twins
from huggingface_models import ARCHITECTURES, logits_of, token_batch

TP, PP = {"tp": 2}, {"pp": 2}
CELLS = [
    ("llama-gqa", TP, torch.no_grad),
    ("gpt2", {**PP, "schedule": "zb-h1"}, torch.no_grad),
    ("bert", {**TP, "sequence_parallel": True}, torch.inference_mode),
    ("gpt2", PP, torch.inference_mode),
    ("llama-gqa", {"data_parallel": {"name": "zero3"}}, torch.inference_mode),
]


@pytest.mark.ranks(2)
def test_evaluation_in_between():
    for name, options, mode in CELLS:
        with case(name, options, mode):
            check(name, options, mode)


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
def test_evaluation_over_shares_of_stages():
    check("llama-gqa", TP | PP, torch.inference_mode)


def check(name, options, mode):
    """With other rows; also between forward and backward, and between backward and step."""
    torch.manual_seed(0)
    both = Twins(ARCHITECTURES[name](2), **options)
    rank, replicas = both.accelerator.mesh["dp"].rank, both.accelerator.mesh["dp"].size

    def evaluate(rows):
        ids = token_batch(99, rows=rows)
        both.model.eval()
        with mode():
            found = logits_of(both.model(ids))
            # Users go on with what they get, in the mode or behind it.
            found = found.float() if not found.is_floating_point() else found + 0
        with torch.no_grad():
            torch.testing.assert_close(found.clone(), logits_of(both.twin.eval()(ids)), **EXACT)
        both.model.train()
        both.twin.train()

    evaluate(3)
    for step in range(2):
        batches = [token_batch(replicas * step + place, rows=4) for place in range(replicas)]
        loss = both.loss(both.model, batches[rank])
        evaluate(1)
        both.accelerator.backward(loss)
        torch.stack([both.loss(both.twin, ids) for ids in batches]).mean().backward()
        evaluate(5)
        if "data_parallel" not in options:
            both.check_gradients()
        both.step()
        evaluate(2)
    both.close()
