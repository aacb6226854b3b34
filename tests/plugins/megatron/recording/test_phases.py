"""Recordings: what is used where, what is refused, and that the model stays as it was."""

import copy
import math
import random

import pytest
import torch
import transformers
from torch import nn

from drivetrain.errors import UsageError
from drivetrain.model.modules import BlockHooks
from drivetrain_megatron.pipeline.cut import balanced, kept_together
from drivetrain_megatron.recording.calls import example_inputs
from drivetrain_megatron.recording.phases import Carried, Constant, Passed, named_blocks
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.recording.shapes import Shapes
from stacks import Stack, record

WIDTH = 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, extra=None):
        return x + self.linear(x if extra is None else x + extra)


class Net(Stack):
    layer = Layer

    def __init__(self):
        first, last = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        super().__init__((self.layer() for _ in range(3)), first=first, last=last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("positions", torch.arange(32).float()[:, None])

    def before(self, ids):
        return self.first(ids) + self.positions[: ids.shape[1]]

    def after(self, x):
        return self.last(self.norm(x.transpose(1, 2)).transpose(1, 2))

    def forward(self, ids):
        return self.after(self.body(self.before(ids)))


IDS = torch.arange(10).view(2, 5)


def phases(recording):
    return {name: sorted(use.phases) for name, use in recording.parameters.items()}


def test_phases_of_parameters_and_buffers():
    found = record(Net(), (IDS,), {})
    assert phases(found) == {
        "first.weight": [0],
        **{f"blocks.{i}.linear.{kind}": [i] for i in range(3) for kind in ("weight", "bias")},
        "norm.weight": [3],
        "norm.bias": [3],
        "last.weight": [3],
        "unused": [],
    }
    assert found.buffers["positions"].ambient
    assert not found.buffers["norm.running_mean"].ambient
    assert sorted(found.buffers["norm.running_mean"].phases) == [3]
    assert all(len(use.phases) < 2 for use in found.parameters.values())
    assert found.dependencies == ()


def test_ties_have_all_names_and_phases():
    model = Net()
    model.last.weight = model.first.weight
    model.blocks[2].linear.bias = model.blocks[0].linear.bias
    uses = record(model, (IDS,), {}).parameters
    found = {name: use for name, use in uses.items() if len(use.phases) > 1}
    assert {name: (use.names, sorted(use.phases)) for name, use in found.items()} == {
        "first.weight": (("first.weight", "last.weight"), [0, 3]),
        "blocks.0.linear.bias": (("blocks.0.linear.bias", "blocks.2.linear.bias"), [0, 2]),
    }


class Tree(Layer):
    def forward(self, x, mask, *, flag):
        return {"x": super().forward(x), "mask": mask, "none": None, "len": mask.sum(1), "f": flag}


def test_structure_of_what_blocks_return():
    class Trees(Net):
        layer = Tree

        def body(self, x):
            mask = torch.ones(x.shape[:2])
            for layer in self.blocks:
                x = layer(x, mask, flag=True)["x"]
            return x

    block = record(Trees(), (IDS,), {}).blocks[0]
    assert block.arguments == ("0", "1", "flag")
    leaves = dict(zip(("x", "mask", "none", "len", "f"), block.output.leaves, strict=True))
    assert leaves == {
        "x": Carried(0),
        "mask": Passed(1),
        "none": Constant(None),
        "len": Carried(1),
        "f": Constant(True),
    }
    assert [(m.shape, m.dtype, m.requires_grad) for m in block.output.metas] == [
        ((2, 5, WIDTH), torch.float32, True),
        ((2,), torch.float32, False),
    ]
    assert block.like == (0, None)


def snapshot(model):
    return [
        (name, dict(m.__dict__), dict(m._parameters), dict(m._buffers), dict(m._modules))
        for name, m in model.named_modules()
    ]


def test_the_model_and_random_numbers_stay_as_they_were():
    class Noisy(Net):
        def body(self, x):
            assert self.training
            self.seen = torch.rand(3) + random.random()
            self.norm.num_batches_tracked.add_(1)
            return super().body(x)

    model = Noisy()
    values, before = copy.deepcopy(model.state_dict()), snapshot(model)
    state, python = torch.get_rng_state(), random.getstate()
    record(model, (IDS,), {})
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    after = snapshot(model)
    for (name, *old), (_, *new) in zip(before, after, strict=True):
        for a, b in zip(old, new, strict=True):
            assert a.keys() == b.keys(), name
            assert all(a[key] is b[key] for key in a), name
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)


def test_a_model_on_meta_gives_the_same_recording():
    with torch.device("meta"):
        model = Net()
    assert record(model, (IDS,), {}) == record(Net(), (IDS,), {})


class Biased(Net):
    """A learned bias goes into every block."""

    def body(self, x):
        return super().body(x, self.unused.mean())


class Skip(Net):
    def body(self, x):
        x = kept = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](x), extra=kept)


class Late(Net):
    """What comes before the blocks is used after them."""

    def forward(self, ids):
        x = self.before(ids)
        return self.after(self.body(x) + x)


class OuterResidual(Net):
    """The sum is outside of the blocks."""

    def body(self, x):
        for layer in self.blocks:
            x = x + layer(x)
        return x


class InPlace(Net):
    """The code around blocks writes into the tensor that crosses."""

    def body(self, x):
        for layer in self.blocks:
            x += layer(x)
        return x


ROWS = (*IDS.shape, WIDTH)


BIAS = ("mean", 0, ())
CROSSING = [
    (Net, [[("", 1, ROWS)], [("", 2, ROWS)], [("", 3, ROWS)]]),
    (Biased, [[BIAS, ("", 1, ROWS)], [BIAS, ("", 2, ROWS)], [("", 3, ROWS)]]),
    (Skip, [[("", 1, ROWS)], [("", 1, ROWS), ("", 2, ROWS)], [("", 3, ROWS)]]),
    (Late, [[("add", 0, ROWS), ("", k, ROWS)] for k in (1, 2, 3)]),
    # One tensor crosses after the sum, where two would before it. After the last block two do:
    # the rest of the model begins there.
    (OuterResidual, [[("add", 1, ROWS)], [("add", 2, ROWS)], [("add", 2, ROWS), ("", 3, ROWS)]]),
    (InPlace, [[("add", 0, ROWS)], [("add", 0, ROWS)], [("add", 0, ROWS), ("", 3, ROWS)]]),
]


def test_tensors_that_cross_each_bound():
    for model, expected in CROSSING:
        found = record(model(), (IDS,), {})
        crossing = [
            [
                (origin.place.function, origin.place.phase, meta.shape)
                for origin, meta in zip(each.origins, each.metas, strict=True)
            ]
            for each in found.crossings
        ]
        assert crossing == expected
        assert found.dependencies == ()
        assert found.crossings[0].nbytes == sum(4 * math.prod(shape) for *_, shape in expected[0])


def test_writing_before_a_cut_is_noted():
    crossings = record(InPlace(), (IDS,), {}).crossings
    found = [sorted((place.phase, place.function) for place in each.changes) for each in crossings]
    writes = [(1, "add_"), (2, "add_"), (3, "add_")]
    assert found == [writes[:1], writes[:2], writes]


def test_the_output_of_an_encoder_crosses_to_every_block_of_the_decoder():
    config = transformers.T5Config(
        d_model=12, d_ff=20, d_kv=4, num_layers=3, num_heads=3, vocab_size=97,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    found = record(model, (), {"input_ids": IDS, "labels": IDS})
    sides = [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(3)]
    assert [block.name for block in found.blocks] == sides
    assert not kept_together(found)
    rows = [[meta.shape for meta in crossing.metas] for crossing in found.crossings]
    assert [shapes.count((2, 5, 12)) for shapes in rows] == [1, 1, 1, 2, 2, 1]  # hidden states
    assert [shapes.count((1, 3, 5, 5)) for shapes in rows] == [1, 1, 1, 2, 2, 2]  # scores
    assert balanced(found, 6).stages == 6


class Missing(Net):
    def body(self, x):
        return self.blocks[1](x)


class Branch(Net):
    def after(self, x):
        return super().after(x if x.sum() > 0 else -x)


class Odd(Net):
    class Layer(Layer):
        def forward(self, x):
            self.out = object()
            return super().forward(x), self.out

    layer = Layer

    def body(self, x):
        return self.blocks[0](x)[0]


def test_refused():
    for model, message in (
        (Missing(), r"blocks\.0, blocks\.2 and 0 more were not"),
        (Branch(), "another pipeline stage"),
        (Odd(), r"block 'blocks\.0' to return.*a object"),
        (nn.Embedding(11, 3), "modules that can be blocks"),
    ):
        with pytest.raises(UsageError, match=message):
            record(model, (IDS,), {})
    # A block with another result than before is refused in one line.
    found = record(Net(), (IDS,), {}).blocks[0]
    with pytest.raises(UsageError) as error:
        found.output.carried("blocks.0", (torch.ones(1), [None, None]))
    expected = "with a result of value, found a result of tuple (value, list of 2 values): "
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def shapes_of(found, model):
    return Shapes(found, model, BlockHooks(named_blocks(found.names, model)), torch.device("cpu"))


def test_shapes_are_known_for_other_inputs_and_remembered():
    model = Net()
    found = record(model, (IDS,), {})
    ran = []
    for layer in model.blocks:
        compute = layer.linear.forward
        layer.linear.forward = lambda x, compute=compute: ran.append(1) or compute(x)
    shapes, counts = shapes_of(found, model), []
    for rows in (2, 3, 4, 5, 3):
        ran.clear()
        metas = shapes.of((torch.zeros(rows, 7, dtype=torch.long),), {}).outputs
        assert [[m.shape for m in block] for block in metas] == [[(rows, 7, WIDTH)]] * 3
        counts.append(len(ran))
    assert counts == [3, 3, 0, 0, 0]
    assert not isinstance(model.last.weight, StageProxy)


class Counting(Layer):
    """Looks at values, and makes one row less."""

    def forward(self, x):
        assert not x[0, 0].isnan().item()
        return super().forward(x)[1:]


def test_shapes_of_runs_with_random_values_are_forgotten_one_day(monkeypatch):
    monkeypatch.setattr("drivetrain_megatron.recording.shapes._KEPT", 2)
    model = nn.Sequential(*(Counting() for _ in range(2)))
    shapes = shapes_of(record(model, (torch.ones(4, WIDTH),), {}), model)
    for rows in (4, 5, 6, 7):
        assert shapes.of((torch.ones(rows, WIDTH),), {}).outputs[-1][0].shape == (rows - 2, WIDTH)
    assert len(shapes._random) == 2


class Limited(Layer):
    """Runs for two rows alone."""

    def forward(self, x):
        if len(x) != 2:
            raise RuntimeError("two rows")
        return super().forward(x)


def test_shapes_that_a_block_does_not_tell_are_said_to_be_taken(caplog):
    model = nn.Sequential(*(Limited() for _ in range(3)))
    found = record(model, (torch.ones(2, WIDTH),), {})
    outputs = shapes_of(found, model).of((torch.ones(5, WIDTH),), {}).outputs
    assert [[meta.shape for meta in block] for block in outputs] == [[(5, WIDTH)]] * 3
    assert "the shapes that block '0' returns are not known" in caplog.text
    assert "RuntimeError: two rows" in caplog.text


class Needs(nn.Module):
    """Accepts one kind of input."""

    def __init__(self, layer, check):
        super().__init__()
        self.layer, self.check = layer, check

    def forward(self, x):
        self.check(x)
        return self.layer(x)


def three(x):
    if x.dim() != 3:
        raise ValueError("three dims")


def never(x):
    raise KeyError("labels")


def test_guessed_inputs():
    """The model's own inputs come first."""
    layer = nn.TransformerEncoderLayer(12, 3, batch_first=True)
    for model, shape, dtype in (
        (nn.Embedding(5, 3), (2, 8), torch.long),
        (nn.Linear(7, 3), (2, 7), torch.float32),
        (nn.Linear(7, 3).double(), (2, 7), torch.float64),
        (Needs(nn.Linear(7, 3), three), (2, 8, 7), torch.float32),
        (nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (2, 8, 12), torch.float32),
        (nn.Conv2d(3, 4, 3), (2, 3, 32, 32), torch.float32),
        (Net(), (2, 8), torch.long),
    ):
        (guess,) = example_inputs(model).args
        assert (guess.shape, guess.dtype) == (shape, dtype)
        model(guess)
    model.dummy_inputs = {"ids": IDS}
    assert dict(example_inputs(model).kwargs) == {"ids": IDS}
    model.dummy_inputs = (IDS,)
    assert example_inputs(model).args == (IDS,)
    model.dummy_inputs = 3
    with pytest.raises(UsageError, match="example_inputs.*found a int"):
        example_inputs(model)
    for model in (Needs(nn.Linear(7, 3), never), nn.ReLU()):
        with pytest.raises(UsageError, match=r"model\.example_inputs ="):
            example_inputs(model)
