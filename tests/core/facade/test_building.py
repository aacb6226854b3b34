"""Models built inside building() get the weights of ordinary ones, on every rank or nowhere."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain import Accelerator, CheckpointError, RankMismatchError, UsageError, communication
from drivetrain.testing.models import cross_entropy, tokens
from stacks import Gpt


@pytest.mark.ranks(2)
def test_ranks_that_would_make_different_weights():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    with accelerator.building():
        model = nn.Linear(2, 2)
    with pytest.raises(RankMismatchError, match=r"from random state .* same seed"):
        accelerator.prepare(model)
    with accelerator.building():
        model = nn.Linear(2, 2)
    if accelerator.process_index == 1:  # without a recording
        model = nn.Linear(2, 2, device="meta")
    with pytest.raises(RankMismatchError, match=r"no values: .*weight, bias"):
        accelerator.prepare(model)
    accelerator.end_training()


def tower():
    """Return a layer with what no strategy looks after: a plain tensor, and one in a list."""
    layer = nn.Linear(3, 3)
    layer.scale = torch.ones(3) * 2
    layer.offsets = [torch.arange(3).float()]
    return layer


def test_plain_attributes_get_values():
    for strategy in ("ddp", "zero3", "fsdp"):
        accelerator = Accelerator(cpu=True, strategy=strategy)
        with accelerator.building():
            body = tower()
        with accelerator.building():
            head = nn.Linear(3, 2)
        accelerator.prepare(nn.Sequential(body, nn.LayerNorm(3), head))  # of several constructions
        assert body.scale.tolist() == [2, 2, 2]
        assert body.offsets[0].tolist() == [0, 1, 2]
        assert head(nn.LayerNorm(3)(torch.ones(1, 3))).isfinite().all()
        accelerator.end_training()
    accelerator = Accelerator(cpu=True)
    with accelerator.building():
        model = tower()
    model = accelerator.prepare_model(model, evaluation_mode=True)
    assert (model.scale.tolist(), model.offsets[0].tolist()) == ([2, 2, 2], [0, 1, 2])
    assert model(torch.ones(1, 3)).isfinite().all()


def test_state_made_by_an_optimizers_constructor():
    accelerator = Accelerator(cpu=True)
    with accelerator.building():
        model = nn.Linear(3, 3)
        optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    model, prepared = accelerator.prepare(model, optimizer)
    assert optimizer.state[model.weight]["sum"].eq(0.5).all()
    accelerator.backward(model(torch.ones(1, 3)).sum())
    prepared.step()
    with accelerator.building():
        other = nn.Linear(3, 3)
    with pytest.raises(UsageError, match="state sum of Adagrad"):
        accelerator.prepare(other, torch.optim.Adagrad(other.parameters()))


def test_wrong_uses():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match=r"found 2 on the meta device .* weight, bias; construct"):
        accelerator.prepare(nn.Linear(2, 2, device="meta"))
    refused = pytest.raises(UsageError, match="one inside of another")
    with accelerator.building(), refused, accelerator.building():
        pass
    with accelerator.building():
        model = nn.Linear(2, 2)
        with pytest.raises(UsageError, match="found it inside; leave the context first"):
            accelerator.prepare(model)
    accelerator.free_memory()
    with pytest.raises(UsageError, match="no building"):
        accelerator.prepare(model)
    with accelerator.building(), pytest.raises(RuntimeError, match="failed"):
        raise RuntimeError("failed")
    assert not torch.ones(2).is_meta


def test_initialisation_after_the_context():
    accelerator = Accelerator(cpu=True)
    with accelerator.building():
        model = nn.Linear(2, 2)
    nn.init.zeros_(model.bias)
    with pytest.raises(UsageError, match=r"'bias' .* changed after the context ended"):
        accelerator.prepare(model)
    with accelerator.building():
        model = nn.Linear(2, 2)
        nn.init.zeros_(model.bias)
        model.shape_only = torch.empty(3)
    model.template = torch.empty(3, device="meta")  # ordinary construction has it there too
    accelerator.prepare(model)
    assert model.bias.eq(0).all()
    assert model.template.is_meta
    assert not model.shape_only.is_meta


def small():
    """Tied weights, a buffer, one that is not saved, and a parameter that exists already."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("fleeting", torch.arange(3), persistent=False)
    model.temperature = nn.Parameter(torch.tensor(1.0))
    return model


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
@pytest.mark.parametrize("max_shard_size", ["10GB", 100])
@pytest.mark.ranks(2)
def test_weights_of_an_export(strategy, max_shard_size, tmp_path):
    folder = Path(communication.broadcast_object_list([str(tmp_path)])[0])
    accelerator = Accelerator(cpu=True, strategy=strategy)
    torch.manual_seed(1)
    model = small().double()
    with torch.no_grad():
        model[1].running_mean.fill_(3)
        model.temperature.fill_(7)
    model = accelerator.prepare(model)
    expected = accelerator.get_state_dict(model)
    accelerator.save_model(model, folder, max_shard_size=max_shard_size)
    accelerator.wait_for_everyone()
    torch.manual_seed(accelerator.process_index)  # seeds do not matter for what is read
    with accelerator.building(weights=folder):
        streamed = small()
    found = accelerator.get_state_dict(accelerator.prepare(streamed))
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
        assert tensor.dtype is (torch.int64 if "num_batches" in name else torch.float32)
    assert streamed.fleeting.tolist() == [0, 1, 2]


def test_exports_that_do_not_fit(tmp_path, caplog):
    accelerator = Accelerator(cpu=True)
    file = tmp_path / "model.safetensors"
    weight, bias = torch.ones(2, 2), torch.ones(2)

    def built(**tensors):
        save_file(tensors, file)
        with accelerator.building(tmp_path):
            return nn.Linear(2, 2)

    with pytest.raises(CheckpointError, match="found neither"), accelerator.building(tmp_path):
        pass
    with pytest.raises(CheckpointError, match="1 are missing: bias; it holds weight"):
        accelerator.prepare(built(weight=weight))
    with pytest.raises(CheckpointError, match=r"shape \(2, 2\), found \(3, 2\)"):
        accelerator.prepare(built(weight=torch.ones(3, 2), bias=bias))
    model = accelerator.prepare(built(weight=weight, bias=bias, more=torch.ones(1)))
    assert "1 tensors that Linear has not" in caplog.text
    assert model.weight.eq(1).all()
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="not whole"), accelerator.building(file):
        pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero3"])
def test_trains_as_an_ordinary_model_does(strategy):
    """With several units, of which one is used again after others."""
    found = []
    for deferred in (False, True):
        accelerator = Accelerator(cpu=True, strategy=strategy)
        torch.manual_seed(0)
        with accelerator.building() if deferred else nullcontext():
            model = Gpt(4)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        assert all(p.is_meta for p in model.parameters()) is deferred
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(2):
            batch = tokens(step, accelerator.process_index)
            accelerator.backward(cross_entropy(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.get_state_dict(model))
        accelerator.free_memory()
    torch.testing.assert_close(*found, rtol=0, atol=0)
