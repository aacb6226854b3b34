"""A model's own ``save_pretrained`` writes whole weights, and a copy's is that of its class."""

import copy
import time
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, CollectiveError

STRATEGIES = {"zero1": "zero1", "zero3": {"name": "zero3", "keep_below": 0}, "fsdp": "fsdp"}


class Saving(nn.Module):
    """Saves itself as savers do that look for shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.body.weight

    def forward(self, x):
        return self.head(self.body(x))

    def save_pretrained(self, folder, *, is_main_process=True, state_dict=None):
        given = self.state_dict() if state_dict is None else state_dict
        places = {name: tensor.data_ptr() for name, tensor in given.items()}
        assert places["body.weight"] == places["head.weight"] != places["body.bias"]
        if is_main_process:
            torch.save({name: tensor.clone() for name, tensor in given.items()}, folder / "weights")


def around():
    """Return a model around one that saves itself."""
    return nn.Sequential(OrderedDict(inner=Saving()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", [Saving, around])
def test_whole_weights_are_saved(name, kind, tmp_path):
    accelerator = Accelerator(cpu=True, strategy=STRATEGIES[name])
    torch.manual_seed(0)
    model = kind()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    saving = accelerator.unwrap_model(model) if kind is Saving else model.inner
    saving.save_pretrained(tmp_path, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    expected = accelerator.get_state_dict(model)
    for key, found in torch.load(tmp_path / "weights").items():
        torch.testing.assert_close(found, expected["inner." * (kind is around) + key])
    if name != "zero1":
        accelerator.free_memory()
        return
    copied = copy.deepcopy(saving)  # of zero1, which has all values at hand
    nn.init.zeros_(copied.body.bias)
    given = partial(saving.save_pretrained, state_dict=copied.state_dict())
    for save in (copied.save_pretrained, given):
        accelerator.wait_for_everyone()
        save(tmp_path, is_main_process=accelerator.is_main_process)
        accelerator.wait_for_everyone()
        assert not torch.load(tmp_path / "weights")["body.bias"].any()


@pytest.mark.ranks(2)
def test_a_save_on_one_rank_ends_soon_with_the_way_out(tmp_path):
    accelerator = Accelerator(cpu=True, strategy=STRATEGIES["fsdp"])
    model = Saving()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"if accelerator\.is_main_process"):
        if accelerator.is_main_process:
            model.save_pretrained(tmp_path)
        accelerator.wait_for_everyone()
    assert time.monotonic() - began < 10
    accelerator.free_memory()
