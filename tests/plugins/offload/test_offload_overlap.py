"""Updates go on in the background: forward waits for the units that it reaches, one by one."""

import threading

import pytest
import torch
from torch import nn

from drivetrain_offload.tiles import Tiler
from waits import PATIENCE_S
from zero_stages import start

LAYERS, WIDTH = 4, 32


@pytest.mark.parametrize(
    ("strategy", "clip"),
    [
        ({"name": "zero1", "bucket_mib": 0.001}, True),
        ({"name": "zero3", "keep_below": 0, "own_unit_from": 1}, False),
        ({"name": "fsdp", "unit_from": 1}, True),
    ],
)
@pytest.mark.ranks(2)
def test_forward_begins_while_later_units_are_updated(strategy, clip, monkeypatch):
    """Only the first updates may pass until the first layer has computed."""
    accelerator = start({**strategy, "offload": {"optimizer": "cpu"}})
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    passed, reached = threading.Event(), threading.Event()
    updates = 0
    real = Tiler.update_all

    def update_all(tiler, pieces):
        nonlocal updates
        updates += 1
        if updates > 2 and not passed.wait(PATIENCE_S):
            raise AssertionError("forward waited for an update that it did not need yet")
        real(tiler, pieces)

    monkeypatch.setattr(Tiler, "update_all", update_all)
    accelerator.backward(model(torch.ones(2, WIDTH)).square().mean())
    if clip:
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()

    def computed(*_):
        assert updates <= 3  # the third one waits
        reached.set()
        passed.set()

    handle = model[0].register_forward_hook(computed)
    loss = model(torch.ones(2, WIDTH)).square().mean()
    handle.remove()
    assert reached.is_set()
    assert updates == LAYERS
    accelerator.backward(loss)
    optimizer.step()
