"""Families beside decoders of text under tensor and pipeline parallelism: equal to one process.

Nobody gives them example inputs; the batch is not cut, since a loss over pairs cannot be.
"""

import copy

import pytest
import torch

from drivetrain import Accelerator
from families import FAMILIES

NAMES = (
    "vit", "dinov2", "swin", "convnext", "segformer", "clip", "whisper", "wav2vec2", "pegasus",
    "bart", "gemma2", "electra",
)  # fmt: skip
CELLS = {"tp2": {"tp": 2}, "pp2": {"pp": 2, "micro_batches": 1}}


@pytest.mark.parametrize("cell", list(CELLS.values()), ids=list(CELLS))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.ranks(2)
def test_a_step_equals_one_process(name, cell):
    family = FAMILIES[name]
    model = family.build()[0].eval()
    twin, batch = copy.deepcopy(model), family.batch(0)
    expected = twin(**batch).loss
    expected.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    accelerator = Accelerator(strategy={"name": "megatron", **cell}, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)
    state = accelerator.get_state_dict(model)
    for key, tensor in twin.state_dict().items():
        torch.testing.assert_close(
            state[key], tensor, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key} {text}"
        )
    accelerator.free_memory()
