"""Evaluation in torch's inference mode over shares of layers and stages, and training after it."""

import copy

import pytest
import torch
from torch.nn import functional as F

from drivetrain import Accelerator
from huggingface_models import ARCHITECTURES, VOCABULARY, logits_of, token_batch

EXACT = {"rtol": 1e-10, "atol": 1e-12}
CELLS = {
    "tp2": (2, {"tp": 2}),
    "sequence": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "zero3": (2, {"data_parallel": {"name": "zero3"}}),
}


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "bert"])
@pytest.mark.parametrize(
    "options",
    [pytest.param(o, id=n, marks=pytest.mark.ranks(ranks)) for n, (ranks, o) in CELLS.items()],
)
def test_inference_mode(name, options):
    torch.manual_seed(0)
    model = ARCHITECTURES[name](4)
    twin = copy.deepcopy(model)
    accelerator = Accelerator(strategy={"name": "megatron", **options}, cpu=True)
    model = accelerator.prepare(model)
    rank, size = accelerator.mesh["dp"].rank, accelerator.mesh["dp"].size

    def evaluate(step):
        ids = token_batch(step, rows=4)
        model.eval()
        with torch.inference_mode():
            found = logits_of(model(ids))
            found = found.float() if not found.is_floating_point() else found + 0
        with torch.no_grad():
            expected = logits_of(twin.eval()(ids))
        torch.testing.assert_close(found.clone(), expected, **EXACT)
        model.train()
        twin.train()

    evaluate(0)
    losses = []
    for each, at in ((model, [rank]), (twin, range(size))):
        given = [token_batch(1 + place, rows=4) for place in at]
        loss = sum(
            F.cross_entropy(logits_of(each(ids)).reshape(-1, VOCABULARY), ids.reshape(-1))
            for ids in given
        ) / len(given)
        losses.append(loss)
    accelerator.backward(losses[0])
    losses[1].backward()
    evaluate(9)
    accelerator.free_memory()
