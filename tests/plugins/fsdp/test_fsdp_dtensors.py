"""The shards as torch's DTensors: what they show, and torch's checkpoints through them.

torch reads its own checkpoints' metadata by pickle: whoever takes them takes that, not drivetrain.
test_fsdp_rows has parameters whose rows do not lie one after the other.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from drivetrain import Accelerator, UsageError
from drivetrain.testing.conformance.suite import everyone, weights
from stacks import Oddities

pytestmark = pytest.mark.ranks(2)

SMALL = {"name": "fsdp", "unit_from": 8}
HYBRID = {**SMALL, "sharding": "hybrid", "shard_size": 2}


def build(seed=3, *, awkward=True):
    """Return a model some of whose rows divide by nothing; where not awkward, without 0-d ones."""
    torch.manual_seed(seed)
    model = Oddities(7, 5)
    if not awkward:
        model.scale = nn.Parameter(torch.tensor([1.5]))
    return model


def start(strategy, model):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.01))


def loss_of(model):
    tokens = torch.arange(6) % 7
    return F.cross_entropy(model(tokens), tokens.flip(0))


def check_values(accelerator, model, expected):
    found = weights(accelerator, model)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def check_doubled(accelerator, model):
    """What is written into the DTensors is computed with, and is what the model has."""
    expected = {name: 2 * tensor for name, tensor in weights(accelerator, model).items()}
    found = accelerator.dtensors(model)
    for name in expected:
        found[name].to_local().mul_(2)
    other = build()
    other.load_state_dict(expected, strict=False)
    torch.testing.assert_close(loss_of(model), loss_of(other))
    check_values(accelerator, model, expected)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        pytest.param(SMALL, 2, marks=pytest.mark.ranks(2), id="full-2"),
        pytest.param(SMALL, 3, marks=pytest.mark.ranks(3), id="full-3"),
        pytest.param(HYBRID, 4, marks=pytest.mark.ranks(4), id="hybrid-4"),
    ],
)
def test_facts_are_those_of_distribute_tensor(strategy, world):
    """Placements, local shapes and values, after a step too; and what is written into them."""
    accelerator, model, optimizer = start(strategy, build())
    for _ in range(2):
        expected = weights(accelerator, model)
        found = accelerator.dtensors(model)
        assert list(found) == list(model.state_dict()), "order and names are the model's"
        assert found["last.weight"] is found["first.weight"]
        for name, wanted in expected.items():
            tensor = found[name]
            assert isinstance(tensor, DTensor)
            assert torch.equal(tensor.full_tensor(), wanted), f"{name} on {world}"
            assert not tensor.requires_grad
            long = [dim for dim, size in enumerate(wanted.shape) if size > 1]  # one row is not cut
            placement = Shard(min(long, default=0)) if wanted.dim() else Replicate()
            assert name in ("one", "empty") or placement in (Shard(0), Replicate())
            copies = [Replicate()] * (tensor.device_mesh.ndim - 1)
            assert tensor.placements == (*copies, placement)
            theirs = distribute_tensor(wanted, tensor.device_mesh, tensor.placements)
            assert torch.equal(tensor.to_local(), theirs.to_local()), f"{name} on {world}"
            assert (tensor.shape, tensor.stride()) == (theirs.shape, theirs.stride())
        accelerator.backward(loss_of(model))
        optimizer.step()
    with torch.no_grad():
        loss_of(model)
    check_doubled(accelerator, model)


@pytest.mark.parametrize("sharding", ["full", "grad"])
def test_what_is_written_is_not_hidden_by_whole_values(sharding):
    """Those of a step that is under way, or of a forward whose backward never came."""
    accelerator, model, optimizer = start({**SMALL, "sharding": sharding}, build())
    for goes_back in (True, False):
        loss = loss_of(model)
        if goes_back:
            accelerator.backward(loss)
            optimizer.zero_grad()
        check_doubled(accelerator, model)


def test_exchange_with_fully_shard(tmp_path):
    """torch's own sharded model loads what is saved here, and the other way round."""
    # torch shards no 0-d parameters.
    accelerator, model, _ = start(SMALL, build(awkward=False))
    expected = weights(accelerator, model)
    dcp.save(dict(accelerator.dtensors(model)), checkpoint_id=tmp_path / "ours")
    everyone(None)
    theirs = fully_shard(build(seed=9, awkward=False), mesh=init_device_mesh("cpu", (2,)))
    state = get_model_state_dict(theirs)
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    set_model_state_dict(theirs, state)
    loaded = get_model_state_dict(theirs)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].full_tensor(), tensor), name
    torch.testing.assert_close(loss_of(theirs), loss_of(model))
    tripled = {name: 3 * tensor for name, tensor in loaded.items()}
    dcp.save(tripled, checkpoint_id=tmp_path / "theirs")
    everyone(None)
    dcp.load(dict(accelerator.dtensors(model)), checkpoint_id=tmp_path / "theirs")
    check_values(accelerator, model, {name: 3 * tensor for name, tensor in expected.items()})


def test_strategies_without_rows_and_ranks_with_whole_tensors_are_refused():
    rows, several = "keeps rows of each parameter", "several ranks"
    for strategy, found in (
        ({"name": "zero3"}, rows),
        ({"name": "ddp"}, rows),
        ({**HYBRID, "shard_size": 1}, several),
    ):
        accelerator, model, _ = start(strategy, build())
        with pytest.raises(UsageError, match=found):
            accelerator.dtensors(model)
