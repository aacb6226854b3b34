"""A checkpoint of every installed strategy: saved in the background, verified, exported, loaded."""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.checkpoint.export import export_checkpoint, read_export
from drivetrain.checkpoint.loading import find_problems
from drivetrain.registry import strategies

NAMES = strategies().names


def build(strategy, dtype=torch.float32, **options):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, strategy=strategy, **options)
    layers = (nn.Embedding(33, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 33, False))
    model = nn.Sequential(*layers).to(dtype)
    model[3].weight = model[0].weight
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.arange(8)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def same(found, expected, dtype=None):
    return all(
        torch.equal(tensor.to(dtype or tensor.dtype), expected[name].to(dtype or tensor.dtype))
        for name, tensor in found.items()
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_life_of_a_checkpoint(tmp_path, strategy, precision):
    accelerator, model, optimizer = build(strategy, mixed_precision=precision)
    step(accelerator, model, optimizer)
    expected = accelerator.get_state_dict(model)
    accelerator.save_state(tmp_path / "ck", wait=False)
    for _ in range(2):
        step(accelerator, model, optimizer)
    accelerator.wait_for_checkpoint()
    assert find_problems(tmp_path / "ck") == []
    accelerator.load_state(tmp_path / "ck")
    assert same(accelerator.get_state_dict(model), expected)
    accelerator.save_model(model, tmp_path / "model")
    if accelerator.is_main_process:
        export_checkpoint(tmp_path / "ck", tmp_path / "export")
        for folder in ("model", "export"):
            found = dict(read_export(tmp_path / folder))
            assert len(found) == 5  # tied once
            assert same(found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_weights_of_another_dtype_and_strategy(tmp_path, strategy, saved):
    first, model, optimizer = build(strategy, saved)
    step(first, model, optimizer)
    expected = first.get_state_dict(model)
    first.save_state(tmp_path / "ck")
    first.free_memory()
    loaded = torch.bfloat16 if saved is torch.float32 else torch.float32
    for other in NAMES:
        second, fresh, resumed = build(other, loaded)
        second.load_state(tmp_path / "ck")
        assert same(second.get_state_dict(fresh), expected, loaded), other
        step(second, fresh, resumed)
        second.free_memory()
