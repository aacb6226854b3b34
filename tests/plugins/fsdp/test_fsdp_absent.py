"""Parameters of FSDP that are used while their values are away: gathered, or refused by name.

The modules that hold them are not the ones that run; or no module runs at all.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.errors import DrivetrainError, UsageError
from drivetrain.testing.conformance.suite import Twins, weights
from drivetrain.testing.models import HIDDEN, WIDTH, Case, linear, numbers
from stacks import Block, Parts, Tower
from zero_stages import FSDP, assert_freed, each, start

pytestmark = pytest.mark.ranks(2)


def read(m, x):
    """The weight of a layer that stands elsewhere, and that the reader does not hold."""
    other = m.others[0]
    return F.linear(torch.tanh(F.linear(x, other.weight, other.bias)), other.weight.T)


class Net(Tower):
    """A tower with a layer that nobody calls, and a module that reads its weight."""

    def __init__(self):
        super().__init__()
        self.apart = linear(WIDTH, HIDDEN)
        self.reader = Parts(read, others=[self.apart])  # a list: no child

    def body(self, x):
        for block in self.blocks:
            x = self.reader(block(x))
        return x

    def forward(self, x):
        return super().forward(x) + (x @ self.blocks[0].up.weight.T).mean()


def loss_of(model, batch):
    """Read parameters in the loss: whole, as views, without gradients, and twice."""
    block = model.blocks[1]
    loss = F.mse_loss(model(batch.inputs), batch.targets)
    loss = loss + 0.1 * block.up.weight.square().mean()
    loss = loss + 0.1 * torch.matmul(block.up.weight, block.down.weight).sin().mean()
    with torch.no_grad():
        factor = 1 + model.last.weight.norm()
    return loss * factor + 0.01 * sum(p.abs().sum() for p in model.parameters())


NET = Case("net", Net, loss=loss_of)
READS = {
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


def test_reads_between_steps_and_after_the_end():
    """Values that are away are read right; after ``free_memory`` every use of them says so."""
    accelerator = start(FSDP)
    twins = Twins(accelerator, NET)
    twins.backward(0)
    assert_freed(twins)
    twins.step()
    weight, theirs = twins.model.blocks[0].up.weight, twins.twin.blocks[0].up.weight
    exact = {"rtol": 1e-10, "atol": 1e-10}
    with torch.no_grad():
        for name, read in READS.items():
            found, expected = (torch.as_tensor(read(p)) for p in (weight, theirs))
            torch.testing.assert_close(found, expected, **exact, msg=name)
            assert_freed(twins)
    assert len(weight) == HIDDEN
    copied = copy.deepcopy(twins.model)
    for name, parameter in copied.named_parameters():
        assert type(parameter) is nn.Parameter
        torch.testing.assert_close(parameter, twins.twin.get_parameter(name), **exact)
    copied(torch.ones(2, WIDTH).double()).sum().backward()
    assert_freed(twins)
    twins.backward(1)
    twins.step()
    twins.check()

    loss = twins.loss(2)
    accelerator.free_memory()
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


WRITES = {
    "copy_": lambda p: p.copy_(torch.zeros(HIDDEN, WIDTH)),
    "mul_": lambda p: p.mul_(2.0),
    "+=": lambda p: p.__iadd__(1),
    "[0] =": lambda p: p.__setitem__(0, 1.0),
    "init": nn.init.zeros_,
    "data": lambda p: setattr(p, "data", torch.zeros(HIDDEN, WIDTH).double()),
    "set_": lambda p: p.set_(torch.zeros(HIDDEN, WIDTH).double()),
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
    "collective": torch.distributed.all_reduce,
}


@each("fsdp", "grad")
def test_writes_and_views_are_refused(strategy):
    """By name, on every rank, and nothing has changed; also changes between the two passes."""
    accelerator = start(strategy)
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
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    twins.check()
    loss = twins.loss(0)
    with accelerator.gathered(twins.model), torch.no_grad():
        if accelerator.is_main_process:
            weight.mul_(2.0)
    with pytest.raises(UsageError, match=r"blocks\.1 .* changed in place before backward"):
        accelerator.backward(loss)


class BoundedBlock(Block):
    """Bounds its own weight in forward."""

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Bounded(Tower):
    """Bounds weights in forward, also those of a block that is about to run, and of the last."""

    block = BoundedBlock

    def body(self, x):
        with torch.no_grad():
            for block in self.blocks[:2]:
                block.down.weight.clamp_(-0.1, 0.1)  # twice as once
        return super().body(x)


class Encoder(Tower):
    """A model that scripts use by a method beside ``forward``, which takes views of parameters."""

    def __init__(self):
        super().__init__(2)
        self.positions = nn.Parameter(torch.randn(2 * WIDTH, dtype=torch.float64))

    def encode(self, x):
        x = self.body(x + self.positions[:WIDTH])
        first, second = self.blocks[0].up.weight.T.chunk(2)
        return x + F.linear(x[:, : len(first)], first.T).mean(1, keepdim=True) + second.mean()


def encoded(model, batch):
    return (model.last(model.encode(batch.inputs)) - batch.targets).square().mean()


@each("fsdp", "grad")
def test_writes_in_a_forward_and_views_outside_of_it(strategy):
    """The former reach the shards; the latter are copies with gradients, and memory is freed."""
    for case, use in (
        (Case("bounded", Bounded), nn.Module.__call__),
        (Case("encoder", Encoder, loss=encoded), Encoder.encode),
    ):
        accelerator = start(strategy)
        twins = Twins(accelerator, case)
        for step in range(3):
            twins.backward(step)
            twins.step()
            twins.check()
            with torch.no_grad():
                x = numbers(9, 0).inputs
                both = twins.model, twins.twin
                ours, theirs = (use(model, x) for model in both)
                torch.testing.assert_close(ours, theirs)
                assert type(ours) is torch.Tensor
            twins.check()
        twins.backward(4)
        twins.step()
        assert_freed(twins)
