"""Exports of a model whose parameters have memory only while they are gathered."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, UsageError
from drivetrain.checkpoint.export import read_export
from drivetrain.parallel import replicated as copies
from stacks import Stack


def net():
    """Tied, frozen and trainable weights, and a buffer."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(3)]
    first, last = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    model = Stack(layers, first=first, last=last, tied=True)
    model.register_buffer("scale", torch.tensor([2.0]))
    layers[0].requires_grad_(False)
    return model


class Emptied:
    """Lets a model's parameters have memory inside ``gathered`` only, as ZeRO-3 does."""

    def __init__(self, state, model, monkeypatch):
        self.values = {p: p.detach().clone() for p in model.parameters()}
        self.entered = []
        for parameter in self.values:
            parameter.untyped_storage().resize_(0)
        monkeypatch.setattr(state, "gathered", self.gathered)

    @contextmanager
    def gathered(self, parameters, **_):
        held = list(parameters)
        self.entered.append(sum(p.numel() * p.element_size() for p in held))
        for parameter in held:
            parameter.untyped_storage().resize_(self.values[parameter].nbytes)
            with torch.no_grad():
                parameter.copy_(self.values[parameter])
        yield
        for parameter in held:
            parameter.untyped_storage().resize_(0)


@pytest.fixture
def made(monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    emptied = Emptied(accelerator.strategy_of(model).state, model, monkeypatch)
    yield accelerator, model, expected, emptied
    for parameter, value in emptied.values.items():
        parameter.untyped_storage().resize_(value.nbytes)
    accelerator.free_memory()


def same(found, expected):
    alike = (torch.equal(tensor, expected[name]) for name, tensor in found.items())
    return found.keys() == expected.keys() and all(alike)


def test_save_model_gathers_a_few_at_a_time(made, tmp_path, monkeypatch):
    accelerator, model, expected, emptied = made
    accelerator.save_model(model, tmp_path)
    assert len(emptied.entered) == 1, "small parameters share a gather"
    emptied.entered.clear()
    monkeypatch.setattr(copies, "MOST_BYTES", 300)
    accelerator.save_model(model, tmp_path)
    del expected["last.weight"]  # tied: empty tensors must not be taken for one another either
    assert same(dict(read_export(tmp_path)), expected)
    assert max(emptied.entered) == 16 * 8 * 4
    assert len(emptied.entered) > 4
    accelerator.save_model(model, tmp_path, max_shard_size=600)
    assert same(dict(read_export(tmp_path)), expected)


def test_state_dict_is_whole_and_keeps_ties(made, monkeypatch):
    accelerator, model, expected, emptied = made
    monkeypatch.setattr(copies, "MOST_BYTES", 300)
    found = accelerator.get_state_dict(model)
    assert same(found, expected)
    assert found["last.weight"] is found["first.weight"]
    assert max(emptied.entered) == 16 * 8 * 4
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())


def test_a_state_dict_stays_as_it_was_when_training_goes_on():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    found = accelerator.get_state_dict(model)
    before = {name: tensor.clone() for name, tensor in found.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert same(found, before)


def test_only_trainable(made, tmp_path):
    accelerator, model, _, _ = made
    accelerator.save_model(model, tmp_path, only_trainable=True)
    layers = [f"blocks.{layer}.{name}" for layer in (1, 2) for name in ("bias", "weight")]
    assert sorted(dict(read_export(tmp_path))) == [*layers, "first.weight"]
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="expected trainable parameters in Stack"):
        accelerator.save_model(model, tmp_path, only_trainable=True)
