"""Parameters of FSDP that are used while their values are away: gathered, or refused by name.

The modules that hold them are not the ones that run; or no module runs at all.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import DrivetrainError, UsageError
from drivetrain.testing.conformance.twins import Twins, weights
from drivetrain.testing.models import HIDDEN, OUT, WIDTH, Case, linear, numbers
from towers import Block

STRATEGIES = {
    "full": {"unit_from": 10},
    "grad": {"unit_from": 10, "sharding": "grad"},
}
EACH = pytest.mark.parametrize("strategy", list(STRATEGIES.values()), ids=list(STRATEGIES))
TWO = pytest.mark.parametrize("sharding", ["full", "grad"])


class Reader(nn.Module):
    """Reads the weight of a layer that stands elsewhere, and that it does not hold."""

    def __init__(self, other):
        super().__init__()
        self.others = [other]  # a list: no child

    def forward(self, x):
        other = self.others[0]
        return F.linear(torch.tanh(F.linear(x, other.weight, other.bias)), other.weight.T)


class Net(nn.Module):
    """Blocks, one that nobody calls, and a module that reads the weight of that one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.apart = linear(WIDTH, HIDDEN)
        self.reader = Reader(self.apart)
        self.last = linear(WIDTH, OUT)

    def forward(self, x):
        for block in self.blocks:
            x = self.reader(block(x))
        return self.last(x) + (x @ self.blocks[0].up.weight.T).mean()


def loss_of(model, batch):
    """Read parameters in the loss: whole, as views, without gradients, and twice."""
    block = model.blocks[1]
    loss = F.mse_loss(model(batch.inputs), batch.targets)
    loss = loss + 0.1 * block.up.weight.square().mean()
    loss = loss + 0.1 * torch.matmul(block.up.weight, block.down.weight).sin().mean()
    with torch.no_grad():
        factor = 1 + model.last.weight.norm()
    return loss * factor + 0.01 * sum(p.abs().sum() for p in model.parameters())


NET = Case(name="net", factory=Net, batch=numbers, loss=loss_of)


def start(strategy):
    return Accelerator(strategy={"name": "fsdp", **strategy}, cpu=True)


def units_of(twins):
    return twins.accelerator.strategy_of(twins.model).placement.units


def assert_freed(twins):
    whole = [unit.label for unit in units_of(twins) if unit.live_bytes]
    assert not whole, f"still whole: {whole}"


@pytest.mark.ranks(2)
def test_reads_between_steps():
    """Sums, comparisons, copies and slices of values that are away are right on every rank."""
    accelerator = start(STRATEGIES["full"])
    twins = Twins(accelerator, NET)
    twins.backward(0)
    assert_freed(twins)
    twins.step()
    ours, theirs = twins.model.blocks[0].up.weight, twins.twin.blocks[0].up.weight
    reads = {
        "norm": lambda p: p.norm(),
        "product": lambda p: torch.matmul(torch.ones(3, HIDDEN).double(), p),
        "rows": lambda p: torch.index_select(p, 0, torch.tensor([1, 3])),
        "comparison": lambda p: p > 0,
        "list": lambda p: p.tolist(),
        "loop": lambda p: sum(float(row.sum()) for row in p.clone()),
        "bool": lambda p: bool((p == p).all()),
        "copy": lambda p: copy.deepcopy(p).data,
        "into": lambda p: torch.zeros(HIDDEN, WIDTH).double().copy_(p),
        "float": lambda p: p.float(),
        "stack": lambda p: torch.stack([p, p]),
    }
    with torch.no_grad():
        for name, read in reads.items():
            found, expected = (torch.as_tensor(read(p)) for p in (ours, theirs))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=name)
            assert_freed(twins)
    assert len(ours) == HIDDEN
    assert "values elsewhere" in repr(ours)
    copied = copy.deepcopy(twins.model)
    for name, parameter in copied.named_parameters():
        assert type(parameter) is nn.Parameter
        torch.testing.assert_close(
            parameter, twins.twin.get_parameter(name), rtol=1e-10, atol=1e-10
        )
    copied(torch.ones(2, WIDTH).double()).sum().backward()
    assert_freed(twins)
    twins.backward(1)
    twins.step()
    twins.check()
    accelerator.free_memory()


def add(parameter):
    parameter += 1


def element(parameter):
    parameter[0] = 1.0


def data(parameter):
    parameter.data = torch.zeros(HIDDEN, WIDTH, dtype=torch.float64)


WRITES = {
    "copy_": lambda p: p.copy_(torch.zeros(HIDDEN, WIDTH)),
    "mul_": lambda p: p.mul_(2.0),
    "+=": add,
    "[0] =": element,
    "init": nn.init.zeros_,
    "data": data,
    "data.mul_": lambda p: p.data.mul_(2.0),
    "detach().zero_": lambda p: p.detach().zero_(),
    "out": lambda p: torch.add(torch.ones(HIDDEN, WIDTH).double(), 1, out=p),
    "a view": lambda p: p.view(-1).zero_(),
    "a view of a view": lambda p: p.view(-1)[2:].add_(1.0),
    "a slice": lambda p: p[0].mul_(2.0),
    "T": lambda p: p.T.fill_(1.0),
    "numpy": lambda p: p.detach().numpy(),
    "pickle": pickle.dumps,  # it would drag all of the unit along
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
}


@TWO
@pytest.mark.ranks(2)
def test_writes_and_views_are_refused(sharding):
    """By name, on every rank; nothing has changed afterwards."""
    accelerator = start(STRATEGIES[sharding])
    twins = Twins(accelerator, NET)
    twins.backward(0)
    twins.step()
    before = weights(accelerator, twins.model)
    weight = twins.model.blocks[1].up.weight
    for name, write in WRITES.items():
        with torch.no_grad(), pytest.raises(UsageError, match=r"blocks\.1\.up\.weight") as caught:
            write(weight)
        assert "accelerator.gathered(model)" in str(caught.value), name
        assert_freed(twins)
    after = weights(accelerator, twins.model)
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    twins.check()
    accelerator.free_memory()


class BoundedBlock(Block):
    """Bounds its own weight in forward."""

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Bounded(nn.Module):
    """Bounds weights in forward, also those of a block that is about to run, and of the last."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(BoundedBlock() for _ in range(3))
        self.head = linear(WIDTH, OUT)

    def forward(self, x):
        with torch.no_grad():
            for block in self.blocks[:2]:
                block.down.weight.clamp_(-0.1, 0.1)  # twice as once
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@EACH
@pytest.mark.ranks(2)
def test_a_forward_changes_parameters(strategy):
    """Its writes reach the shards: in modules that run, and from outside of them."""
    accelerator = start(strategy)
    twins = Twins(accelerator, Case(name="bounded", factory=Bounded))
    for step in range(3):
        twins.backward(step)
        twins.step()
        twins.check()
        for model in (twins.model, twins.twin):
            with torch.no_grad():
                model(numbers(9, 0).inputs)
        twins.check()
    assert_freed(twins)
    accelerator.free_memory()


@TWO
@pytest.mark.ranks(2)
def test_changes_between_forward_and_backward_are_refused(sharding):
    """On every rank, as autograd refuses them where parameters are whole."""
    accelerator = start(STRATEGIES[sharding])
    twins = Twins(accelerator, NET)
    loss = twins.loss(0)
    with accelerator.gathered(twins.model), torch.no_grad():
        if accelerator.is_main_process:
            twins.model.blocks[1].up.weight.mul_(2.0)
    with pytest.raises(UsageError, match=r"blocks\.1 .* changed in place before backward"):
        accelerator.backward(loss)
    accelerator.free_memory()


class Encoder(nn.Module):
    """A model that scripts use by a method beside ``forward``, which takes views of parameters."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(2 * WIDTH, dtype=torch.float64))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = linear(WIDTH, OUT)

    def encode(self, x):
        x = x + self.positions[:WIDTH]
        for block in self.blocks:
            x = block(x)
        first, second = self.blocks[0].up.weight.T.chunk(2)
        return x + F.linear(x[:, : len(first)], first.T).mean(1, keepdim=True) + second.mean()

    def forward(self, x):
        return self.head(self.encode(x))


@EACH
@pytest.mark.ranks(2)
def test_methods_beside_forward(strategy):
    """Views taken outside of a forward are copies: gradients flow, and memory is freed."""

    def loss(model, batch):
        return (model.head(model.encode(batch.inputs)) - batch.targets).square().mean()

    accelerator = start(strategy)
    case = Case(name="encoder", factory=Encoder, batch=numbers, loss=loss)
    twins = Twins(accelerator, case)
    for step in range(3):
        twins.backward(step)
        twins.step()
        twins.check()
        with torch.no_grad():
            encoded = twins.model.encode(numbers(9, 0).inputs)
            torch.testing.assert_close(encoded, twins.twin.encode(numbers(9, 0).inputs))
            assert type(encoded) is torch.Tensor
    twins.backward(4)
    twins.step()
    assert_freed(twins)
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_one_rank_alone():
    """``state_dict()``, printing and facts on one rank: no hang; values are refused by name."""
    accelerator = start(STRATEGIES["full"])
    twins = Twins(accelerator, NET)
    twins.backward(0)
    twins.step()
    if twins.axis.rank == 1:
        state = twins.model.state_dict()
        assert list(state) == list(twins.twin.state_dict())
        for name, shown in state.items():
            theirs = twins.twin.get_parameter(name)
            assert (shown.shape, shown.dtype) == (theirs.shape, theirs.dtype)
            for touch in (torch.sum, torch.clone, lambda t: t.cpu(), lambda t: t.tolist()):
                with pytest.raises(UsageError, match="divided over the ranks") as caught:
                    touch(shown)
                assert f"'{name}'" in str(caught.value), "names the parameter"
            assert "values elsewhere" in repr(shown)
        assert "Linear" in repr(twins.model)
        assert twins.optimizer.state_dict()["param_groups"]
    twins.backward(1)
    twins.step()
    twins.check()
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_after_free_memory():
    """The model stays divided, and says so: in forward, in reads, in copies, in its optimizer."""
    accelerator = start(STRATEGIES["full"])
    twins = Twins(accelerator, NET)
    loss = twins.loss(0)
    accelerator.free_memory()
    weight = twins.model.blocks[0].up.weight
    for use in (
        lambda: twins.model(torch.ones(2, WIDTH).double()),
        lambda: twins.model.blocks[0](torch.ones(2, WIDTH).double()),
        weight.norm,
        lambda: weight.data,
        lambda: copy.deepcopy(weight),
        lambda: copy.deepcopy(twins.model),
        lambda: pickle.dumps(weight),
        weight.zero_,
        lambda: weight.T,
        weight.tolist,
        lambda: float(weight[0, 0]),
        loss.backward,
    ):
        with pytest.raises(DrivetrainError):
            use()
    assert weight.shape == (HIDDEN, WIDTH)
    assert "values elsewhere" in repr(weight)
