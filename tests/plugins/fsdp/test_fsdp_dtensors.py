"""The shards as torch's DTensors: what they show, and torch's checkpoints through them.

torch reads its own checkpoints' metadata by pickle: whoever takes them takes that, not drivetrain.
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
from drivetrain.testing.conformance.twins import everyone, weights

SMALL = {"name": "fsdp", "unit_from": 8}
HYBRID = {**SMALL, "sharding": "hybrid", "shard_size": 2}
RUNS = [
    pytest.param(SMALL, 2, marks=pytest.mark.ranks(2), id="full-2"),
    pytest.param(SMALL, 3, marks=pytest.mark.ranks(3), id="full-3"),
    pytest.param(HYBRID, 4, marks=pytest.mark.ranks(4), id="hybrid-4"),
]


class Net(nn.Module):
    """Rows that divide by nothing, fewer than ranks or none, 0-d, frozen and tied parameters."""

    def __init__(self, *, awkward=True):
        super().__init__()
        self.token = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.fixed = nn.Linear(5, 5).requires_grad_(False)
        self.one = nn.Parameter(torch.randn(1, 5))
        self.scale = nn.Parameter(torch.tensor(1.5) if awkward else torch.tensor([1.5]))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) * self.scale + self.one
        for block in self.blocks:
            x = x + torch.tanh(block(self.fixed(x)))
        return self.head(x) + (x @ self.empty.t()).sum()


class Turned(nn.Module):
    """Parameters whose rows do not lie one after the other."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 5).t())  # (5, 3), column by column
        self.kernel = nn.Parameter(torch.randn(4, 2, 3, 1).to(memory_format=torch.channels_last))

    def forward(self, x):
        return x @ self.matrix + self.kernel.sum()


def build(kind=Net, seed=3, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(**options)


def start(strategy, model):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.01))


def loss_of(model):
    tokens = torch.arange(6) % 7
    return F.cross_entropy(model(tokens), tokens.flip(0))


def check_values(accelerator, model, expected):
    found = weights(accelerator, model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("strategy", "world"), RUNS)
def test_facts_are_those_of_distribute_tensor(strategy, world):
    """Placements, local shapes and values, after a step too."""
    accelerator, model, optimizer = start(strategy, build())
    for _ in range(2):
        expected = weights(accelerator, model)
        found = accelerator.dtensors(model)
        assert list(found) == list(model.state_dict()), "order and names are the model's"
        assert found["head.weight"] is found["token.weight"]
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
            assert tensor.to_local().shape == theirs.to_local().shape, f"{name} on {world}"
            assert torch.equal(tensor.to_local(), theirs.to_local()), f"{name} on {world}"
            assert (tensor.shape, tensor.stride()) == (theirs.shape, theirs.stride())
        accelerator.backward(loss_of(model))
        optimizer.step()
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_parameters_in_another_order_of_memory():
    """They are cut along the dim that is outermost in memory."""
    accelerator, model, _ = start(SMALL, build(Turned))
    expected = weights(accelerator, model)
    found = accelerator.dtensors(model)
    assert {name: tensor.placements for name, tensor in found.items()} == {
        "matrix": (Shard(1),),
        "kernel": (Shard(0),),
    }
    for name, tensor in found.items():
        assert torch.equal(tensor.full_tensor(), expected[name]), name
        assert tensor.stride() == expected[name].stride()
    accelerator.free_memory()


@pytest.mark.parametrize(("strategy", "world"), RUNS)
def test_what_is_written_is_computed_with(strategy, world):
    """They share the shards' memory, a 0-d parameter's on the first rank."""
    accelerator, model, _ = start(strategy, build())
    with torch.no_grad():
        loss_of(model)
    expected = {name: 2 * tensor for name, tensor in values(build()).items()}
    found = accelerator.dtensors(model)
    for name in expected:
        found[name].to_local().mul_(2)
    check_values(accelerator, model, expected)
    other = build()
    other.load_state_dict(expected, strict=False)
    torch.testing.assert_close(loss_of(model), loss_of(other))
    accelerator.free_memory()


@pytest.mark.parametrize("sharding", ["full", "grad"])
@pytest.mark.ranks(2)
def test_what_is_written_is_not_hidden_by_whole_values(sharding):
    """Those of a step that is under way, or of a forward whose backward never came."""
    accelerator, model, optimizer = start({**SMALL, "sharding": sharding}, build())
    for goes_back in (True, False):
        loss = loss_of(model)
        if goes_back:
            accelerator.backward(loss)
            optimizer.zero_grad()
        found = accelerator.dtensors(model)
        expected = {name: 2 * tensor for name, tensor in weights(accelerator, model).items()}
        for name in expected:
            found[name].to_local().mul_(2)
        other = build()
        other.load_state_dict(expected, strict=False)
        torch.testing.assert_close(loss_of(model), loss_of(other))
        check_values(accelerator, model, expected)
    accelerator.free_memory()


# --- torch's distributed checkpoints ---


@pytest.mark.ranks(2)
def test_exchange_with_fully_shard(tmp_path):
    """torch's own sharded model loads what is saved here, and the other way round."""
    model = build(awkward=False)  # torch shards no 0-d parameters
    accelerator, model, _ = start(SMALL, model)
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
    tripled = {name: 3 * tensor for name, tensor in get_model_state_dict(theirs).items()}
    set_model_state_dict(theirs, tripled)
    dcp.save(get_model_state_dict(theirs), checkpoint_id=tmp_path / "theirs")
    everyone(None)
    dcp.load(dict(accelerator.dtensors(model)), checkpoint_id=tmp_path / "theirs")
    check_values(accelerator, model, {name: 3 * tensor for name, tensor in expected.items()})
    torch.testing.assert_close(loss_of(model), loss_of(theirs))
    accelerator.free_memory()


# --- refusals ---


@pytest.mark.ranks(2)
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
        accelerator.free_memory()
