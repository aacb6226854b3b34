"""Compiled blocks train as eager ones, send as much, and make one graph for each class."""

import copy
import functools

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.errors import UsageError
from drivetrain.model import modules
from drivetrain.testing.conformance.suite import Twins
from drivetrain.testing.models import Case
from graphs import backend, graphs
from stacks import Block, Tower


class Gated(Block):
    """Two layers with one input: under tp it enters both at once."""

    def __init__(self):
        super().__init__()
        self.gate = copy.deepcopy(self.up)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class GatedTower(Tower):
    block = Gated


TOWER, GATED = (Case("tower", functools.partial(kind, 4)) for kind in (Tower, GatedTower))


@pytest.fixture
def quick():
    with backend("aot_eager"):
        yield


@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        ({"name": "fsdp"}, {"recompute": {"mode": "full"}}),
        ({"name": "megatron", "tp": 2}, {}),
        ({"name": "zero3"}, {}),
        ({"name": "ddp"}, {}),
    ],
    ids=["fsdp", "tp", "zero3", "ddp"],
)
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_trains_as_one_process_with_the_collectives_of_eager_blocks(strategy, config):
    """Also the blocks that backward computes again, whose parameters no hook brings."""
    sent = []
    with backend("inductor" if strategy["name"] == "ddp" else "aot_eager"):
        for mode in ("none", "blocks"):
            options = {"compile": mode, **config}
            accelerator = Accelerator(strategy=strategy, cpu=True, config=options)
            twins = Twins(accelerator, GATED if "tp" in strategy else TOWER)
            made = []
            for step in range(3):
                twins.backward(step)
                twins.step()
                made.append(graphs())
            twins.check()
            entries = accelerator.traffic.entries()
            sent.append({key: (entry.calls, entry.bytes) for key, entry in entries.items()})
            accelerator.free_memory()
    assert sent[0] == sent[1]
    assert made == [1] * 3


class Scaled(Block):
    """A number of a block is a part of its graph."""

    scale = 1

    def forward(self, x):
        return super().forward(x) / self.scale


class ScaledTower(Tower):
    block = Scaled

    def __init__(self, blocks):
        super().__init__(blocks)
        for number, block in enumerate(self.blocks, 1):
            block.scale = number


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_blocks_keep_their_graphs_for_backward_when_the_class_needs_too_many(caplog):
    config = {"compile": "blocks", "recompute": {"mode": "full"}}
    accelerator = Accelerator(cpu=True, config=config)
    many = torch._dynamo.config.recompile_limit + 2
    twins = Twins(accelerator, Case("scaled", functools.partial(ScaledTower, many)))
    for step in range(2):
        twins.backward(step)
        twins.step()
    twins.check()
    assert "Scaled runs as it is written: its calls need more graphs" in caplog.text
    accelerator.free_memory()
    assert graphs() > 0


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore")
def test_other_shapes_and_evaluation_take_one_more_graph_each():
    accelerator = Accelerator(cpu=True, config={"compile": "blocks"})
    plain = Tower(3)
    model = accelerator.prepare(copy.deepcopy(plain))
    x = torch.randn(8, 7, dtype=torch.float64)
    made = []
    for rows in (8, 6, 4, 8):
        torch.testing.assert_close(model(x[:rows]), plain(x[:rows]))
        made.append(graphs())
    assert made == [1, 2, 2, 2]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), plain(x))
    assert graphs() == 3
    assert list(model.state_dict()) == list(plain.state_dict())
    average = copy.deepcopy(model)
    average.first.weight.data.zero_()
    assert not torch.equal(average(x), model(x))
    accelerator.free_memory()
    assert all("forward" not in block.__dict__ for block in model.blocks)


class Reading(Block):
    """A block whose way depends on a value."""

    def forward(self, x):
        if x.sum() > 0:  # the line of the break
            x = x * 2
        return super().forward(x)


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore")
def test_a_block_that_is_no_graph_runs_as_written_with_one_warning(monkeypatch):
    said = []
    monkeypatch.setattr(modules.logger, "warning", said.append)
    model = Tower(1)
    model.blocks = nn.ModuleList(Reading() for _ in range(2))
    expected = model(x := torch.ones(2, 7, dtype=torch.float64))
    modules.compile_blocks(model, torch.device("cpu"))
    torch.testing.assert_close(model(x), expected)
    model(x)
    (line,) = said
    at = Reading.forward.__code__.co_firstlineno + 1
    assert f"Reading runs as it is written: torch.compile stops at {__file__}:{at}: " in line


@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore")
def test_a_model_without_blocks_is_compiled_whole():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = model(x := torch.ones(2, 3))
    modules.compile_blocks(model, torch.device("cpu"))
    torch.testing.assert_close(model(x), expected)
    assert graphs() == 1


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    accelerator = Accelerator(cpu=True, config={"compile": "blocks"})
    with pytest.raises(UsageError, match="expected recompute full or none, found selective"):
        accelerator.recompute(Tower(2), mode="selective")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with pytest.raises(UsageError, match=r"expected a C\+\+ compiler, found none"):
        accelerator.prepare(Tower(2))


class Aside(Block):
    """A second output, which the loss leaves out."""

    def __init__(self):
        super().__init__()
        self.aside = copy.deepcopy(self.up)

    def forward(self, x):
        return super().forward(x), self.aside(x)


class AsideTower(Tower):
    block = Aside

    def __init__(self, blocks):
        super().__init__(blocks, around=lambda block, x: block(x)[0])


def decaying(model):
    return torch.optim.AdamW(model.parameters(), weight_decay=0.5)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_what_only_unused_outputs_depend_on_has_no_gradient_to_decay_by(strategy):
    with backend("aot_eager"):
        accelerator = Accelerator(strategy=strategy, cpu=True, config={"compile": "blocks"})
        twins = Twins(accelerator, Case("aside", functools.partial(AsideTower, 3)), decaying)
        for step in range(2):
            twins.backward(step)
            twins.step()
        twins.check()
        accelerator.free_memory()
        assert graphs() == 1


class Counting(Block):
    """A number of calls that the block reads before and after it has changed it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        x = x * self.calls.clone()
        self.calls += 1
        return super().forward(x) / self.calls


class CountingTower(Tower):
    block = Counting


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_backward_has_the_buffers_of_its_forward(mode):
    config = {"compile": "blocks", "recompute": {"mode": mode}}
    accelerator = Accelerator(cpu=True, config=config)
    plain = CountingTower(2)
    model = accelerator.prepare(copy.deepcopy(plain))
    calls = [block.calls for block in model.blocks]
    x = torch.randn(8, 7, dtype=torch.float64)
    for step in range(2):
        for each in (plain, model):
            accelerator.backward(each(x).square().mean())
        for mine, ours in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, mine.grad)
        assert [each.item() for each in calls] == [step + 2] * 2
    assert graphs() == 1
    assert all(block.calls is each for block, each in zip(model.blocks, calls, strict=True))
