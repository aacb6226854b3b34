"""A checkpoint of every data-parallel strategy on 1 to 4 ranks, loaded under others on 1 to 4.

The tests that save run first and share their folder with those that load. Every checkpoint is
loaded on every number of ranks, under a strategy that moves on by one each time, so that all pairs
of strategies and all pairs of numbers of ranks occur; and once under its own on as many ranks.
"""

import functools
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from drivetrain import Accelerator
from drivetrain.checkpoint.export import read_export
from drivetrain.testing.conformance.suite import everyone, weights
from stacks import Oddities

STRATEGIES = {
    "ddp": {"name": "ddp"},
    "zero1": {"name": "zero1", "bucket_mib": 0.001},
    "zero2": {"name": "zero2"},
    "zero3": {"name": "zero3", "keep_below": 0},
    "zero3-whole": {"name": "zero3", "keep_below": 0, "partition": "parameter"},
    "fsdp": {"name": "fsdp", "unit_from": 20},
    "fsdp-hybrid": {"name": "fsdp", "unit_from": 20, "sharding": "hybrid"},
}
SHARD_SIZES = {1: 1, 2: 1, 3: 3, 4: 2}
"""Ranks that divide a model under fsdp-hybrid, by number of ranks; of two each has it whole."""
NAMES = list(STRATEGIES)
WORLDS = (1, 2, 3, 4)
ROWS = 12  # divides by every number of ranks: the mean over ranks is the mean over rows
VOCABULARY, WIDTH = 11, 7
SAVED, LAST = 3, 5


class Awkward(Oddities):
    """Unused and transposed parameters, and buffers, too."""

    def __init__(self):
        super().__init__(VOCABULARY, WIDTH)
        self.mix = nn.Parameter(torch.randn(WIDTH, 5).t())  # (5, 7), column by column
        self.kernel = nn.Parameter(torch.randn(3, 1, 5, 1).to(memory_format=torch.channels_last))
        self.unused = nn.Linear(3, 13)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)

    def body(self, x):
        self.calls += 1
        image = (x @ self.mix.t())[:, None, :, None]  # (rows, 1, 5, 1)
        x = x * self.factor + F.conv2d(image, self.kernel).flatten(1).sum(1, keepdim=True)
        return super().body(x)


def build():
    """Return model, optimizer and schedule, the same on every call; all compute is fp64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(23)
        model = Awkward().double()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
    optimizer = AdamW(groups, lr=0.01, weight_decay=0.0)
    return model, optimizer, StepLR(optimizer, step_size=1, gamma=0.7)


def rows(step, rank, ranks):
    """Return this rank's share of a step's tokens and targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (2, ROWS), generator=generator)
    return tokens[:, rank * ROWS // ranks : (rank + 1) * ROWS // ranks]


def train(parts, steps, rank=0, ranks=1, backward=torch.Tensor.backward):
    """Take steps with a rank's rows, and yield the loss of each."""
    model, optimizer, schedule = parts
    for step in steps:
        tokens, targets = rows(step, rank, ranks)
        loss = F.cross_entropy(model(tokens), targets)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.item()


@functools.cache
def uninterrupted():
    """Return the losses of one process, its weights when the others save, and its last ones."""
    parts = build()
    losses, kept = [], []
    for loss in train(parts, range(LAST)):
        losses.append(loss)
        kept.append({name: p.detach().clone() for name, p in parts[0].named_parameters()})
    return losses, kept[SAVED - 1], kept[-1]


class Trained:
    """The model under a strategy."""

    def __init__(self, strategy):
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        options = {"shard_size": SHARD_SIZES[ranks]} if strategy == "fsdp-hybrid" else {}
        self.accelerator = Accelerator(strategy={**STRATEGIES[strategy], **options}, cpu=True)
        self.parts = self.accelerator.prepare(*build())
        self.model = self.parts[0]

    def steps(self, first, last):
        """Train and return the losses over all ranks' rows."""
        place = self.accelerator.process_index, self.accelerator.num_processes
        losses = train(self.parts, range(first, last), *place, self.accelerator.backward)
        return [sum(everyone(loss)) / place[1] for loss in losses]

    def weights(self):
        return weights(self.accelerator, self.model)


def check_close(found, expected, where):
    assert list(found) == list(expected), where
    torch.testing.assert_close(
        found, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{where}\n{text}"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("matrix")


def every_world():
    worlds = [pytest.param(n, marks=pytest.mark.ranks(n)) for n in WORLDS]
    return pytest.mark.parametrize("world", worlds)


@every_world()
def test_save(folder, world):
    """Save after three steps, and go on to know the bits that a resumed run must have."""
    losses, saved, last = uninterrupted()
    for name in NAMES:
        trained = Trained(name)
        assert trained.steps(0, SAVED) == pytest.approx(losses[:SAVED], rel=1e-9)
        check_close(trained.weights(), saved, f"{name} on {world}")
        trained.accelerator.save_state(folder / f"{name}-{world}")
        assert trained.steps(SAVED, LAST) == pytest.approx(losses[SAVED:], rel=1e-9)
        check_close(trained.weights(), last, f"{name} on {world}")
        trained.accelerator.save_model(trained.model, folder / f"{name}-{world}-last")
        trained.accelerator.free_memory()


def check_resumed(folder, saver, savers, loader, world):
    where = f"saved by {saver} on {savers}, loaded by {loader} on {world}"
    losses, saved, last = uninterrupted()
    trained = Trained(loader)
    trained.accelerator.load_state(folder / f"{saver}-{savers}")
    loaded = trained.weights()
    check_close(loaded, saved, where)
    assert trained.model.last.weight is trained.model.first.weight
    assert trained.model.calls.item() == SAVED, where
    assert trained.steps(SAVED, LAST) == pytest.approx(losses[SAVED:], rel=1e-9), where
    found = trained.weights()
    check_close(found, last, where)
    if (saver, savers) == (loader, world):
        for name, tensor in read_export(folder / f"{saver}-{savers}-last"):
            if name in found:
                assert torch.equal(tensor, found[name]), f"{where}: {name} has other bits"
    trained.accelerator.free_memory()


@every_world()
def test_load(folder, world):
    """Loss and weights go on as in the run that was never stopped."""
    if any(not (folder / f"{name}-{n}-last").exists() for name in NAMES for n in WORLDS):
        pytest.skip("needs the checkpoints of test_save, which did not run or failed")
    for savers in WORLDS:
        for i, saver in enumerate(NAMES):
            loader = NAMES[(i + savers + world) % len(NAMES)]
            check_resumed(folder, saver, savers, loader, world)
    for name in NAMES:
        check_resumed(folder, name, world, name, world)


def test_every_pair_occurs():
    """The selection that ``test_load`` makes leaves out no pair of strategies."""
    pairs = {
        (saver, NAMES[(i + savers + world) % len(NAMES)])
        for world in WORLDS
        for savers in WORLDS
        for i, saver in enumerate(NAMES)
    }
    assert len(pairs) == len(NAMES) ** 2
