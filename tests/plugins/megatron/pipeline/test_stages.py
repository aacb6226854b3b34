"""Stages of unmodified models, run one after another: outputs and gradients of the whole model."""

import copy
import itertools
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import huggingface_models
import stacks
from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.cut import balanced, listed
from drivetrain_megatron.pipeline.stage import split
from drivetrain_megatron.pipeline.transfer import MicroBatch
from drivetrain_megatron.recording.proxy import StageProxy
from stacks import record

WIDTH = 12
NUMBERS = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0)).double()
IDS = huggingface_models.token_batch(0, rows=3)
LABELED = {"input_ids": IDS, "labels": IDS}
Residual = partial(stacks.Residual, WIDTH, 16)


class Pair(stacks.Residual):
    """Returns a tree: a second tensor travels, a mask is passed on, None stays."""

    def forward(self, state, mask):
        x, total = state["x"], state["total"]
        x = super().forward(x) * mask
        return {"x": x, "total": total + x.mean(-1), "mask": mask, "none": None}


def pairs():
    def compute(m, x):
        mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
        x = m.first(x)
        state = {"x": x, "total": x.mean(-1)}
        for layer in m.layers:
            state = layer(state, mask)
            mask = state["mask"]
        return {"y": state["x"] * m.scale + m.shift, "total": state["total"]}

    return stacks.Parts(
        compute,
        first=nn.Linear(WIDTH, WIDTH),
        layers=nn.ModuleList(Pair(WIDTH, 16) for _ in range(4)),
        scale=nn.Parameter(torch.ones(WIDTH)),
        shift=nn.Buffer(torch.full((WIDTH,), 0.5)),
    )


class Between(stacks.Stack):
    """A parameter is used before every block, and one in every block and at the end."""

    def __init__(self, layers=4):
        super().__init__(Residual() for _ in range(layers))
        self.shared = nn.Parameter(torch.randn(WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        for layer in self.blocks[1:]:
            layer.up.bias = self.blocks[0].up.bias

    def body(self, x):
        for layer, norm in zip(self.blocks, self.norms, strict=True):
            x = layer(norm(x) * self.shared)
        return x


def sequential():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Residual() for _ in range(4)))


def llama():
    model = huggingface_models.llama(4)
    model.config.use_cache = False
    return model


def build(factory):
    torch.manual_seed(3)
    model = factory().double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def floats(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return [value for value in output.values() if torch.is_tensor(value)]


def loss_of(output):
    return sum(
        (value * torch.linspace(1, 2, value.numel()).view_as(value)).sum()
        for value in floats(output)
    )


def divided(model, layout, owners=None, **kwargs):
    """Return a (copy of the model, its Split) per rank; a number of stages is cut evenly."""
    recording = record(model, () if kwargs else (NUMBERS,), kwargs)
    count = layout if isinstance(layout, int) else len(layout)
    make = balanced if isinstance(layout, int) else partial(listed, layout=layout)
    cut = make(recording, count)
    parts = []
    for mine in owners or [[stage] for stage in range(count)]:
        own = copy.deepcopy(model)
        parts.append((own, split(own, recording, cut, mine)))
    return parts


def first_stage(model, **kwargs):
    """Cut the model itself in two, and return the first stage."""
    recording = record(model, () if kwargs else (NUMBERS,), kwargs)
    return split(model, recording, balanced(recording, 2), [0])


def forward_all(parts):
    """Run the stages in order; return (stage, received, output) of each."""
    stages = sorted((s for _, part in parts for s in part.stages), key=lambda s: s.index)
    received, ran = (), []
    for stage in stages:
        expected = stage.receives(MicroBatch((NUMBERS,), {}))
        assert [(tuple(t.shape), t.dtype) for t in received] == [m[:2] for m in expected]
        received = tuple(
            t.detach().clone().requires_grad_(m.requires_grad)
            for t, m in zip(received, expected, strict=True)
        )
        result = stage.run(MicroBatch((NUMBERS,), {}), [t.view_as(t) for t in received])
        ran.append((stage, received, result))
        received = result.sent
    return ran


def backward_all(ran, loss):
    """Run the backward of each stage, last first, with the gradients of what it sent."""
    roots, seeds = [loss], [None]
    for position in reversed(range(len(ran))):
        torch.autograd.backward(roots, seeds)
        received = ran[position][1]
        used = [i for i, tensor in enumerate(received) if tensor.grad is not None]
        seeds = [received[i].grad for i in used]
        roots = [ran[position - 1][2].sent[i] for i in used]


def assert_equal_to_whole(model, parts):
    whole = copy.deepcopy(model)
    expected = whole(NUMBERS)
    loss_of(expected).backward()
    ran = forward_all(parts)
    found = ran[-1][2].output
    torch.testing.assert_close([*floats(found)], [*floats(expected)], rtol=1e-10, atol=1e-12)
    backward_all(ran, loss_of(found))
    got = {}
    for own, _ in parts:
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                got[name] = got.get(name, 0) + parameter.grad
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert set(got) == set(wanted)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    return ran


def test_stages_equal_the_whole_model():
    for factory, stages in itertools.product((sequential, pairs, Between), (2, 4)):
        model = build(factory)
        parts = divided(model, stages)
        for stage, _, result in assert_equal_to_whole(model, parts):
            values = floats(result.output)
            assert any(type(value) is StageProxy for value in values) == (not stage.is_last)
            assert all(value.requires_grad for value in values)
        names = [
            name
            for own, part in parts
            for name, _ in own.named_parameters()
            if name not in part.stages[0].copies
        ]
        assert sorted(names) == sorted(n for n, _ in model.named_parameters()), "each has one owner"


def test_memory_of_other_stages_is_free():
    model = build(llama)
    recording = record(model, (), LABELED)
    references = {name: weakref.ref(p) for name, p in model.named_parameters()}
    part = split(model, recording, balanced(recording, 2), [1])
    gone = {name for name, reference in references.items() if reference() is None}
    assert {n.split(".")[2] for n in gone if "layers" in n} == {
        str(i) for i in range(part.stages[0].blocks.start)
    }
    assert "model.embed_tokens.weight" in gone
    assert set(model.state_dict()) == set(references) - gone
    assert isinstance(model.model.embed_tokens.weight, StageProxy)


class Skip(stacks.Stack):
    def __init__(self):
        super().__init__((Residual() for _ in range(4)), first=nn.Linear(WIDTH, WIDTH))

    def body(self, x):
        kept = []
        for i, layer in enumerate(self.blocks):
            x = layer(x + kept[1] if i == 3 else x)
            kept.append(x)
        return x


class OuterResidual(Skip):
    def body(self, x):
        for layer in self.blocks:
            x = x + layer(x)
        return x * 2


class InPlaceResidual(Skip):
    def body(self, x):
        for layer in self.blocks:
            x += layer(x * 2)  # the layer keeps its input for backward
        return x * 2


class Forgetful(Skip):
    """The first sum takes the place of a tensor that is used again."""

    def body(self, x):
        kept = x
        for layer in self.blocks:
            x = F.relu(x, inplace=True) + layer(x)
        return x + kept


class Biased(Skip):
    """A tensor made of parameters goes into every block's input."""

    def forward(self, x):
        bias = self.first.bias.exp()
        for layer in self.blocks:
            x = layer(x + bias)
        return x


class Shared(Skip):
    """One block is called again and again."""

    def forward(self, x):
        for _ in range(2):
            for layer in self.blocks[:2]:
                x = layer(x)
            x = self.blocks[3](self.blocks[2](x))
        return self.first(x)


def test_tensors_of_the_code_around_blocks_cross():
    for layout in ([1, 1, 1, 1], [2, 2], [3, 1]):
        model = build(Skip)
        assert_equal_to_whole(model, divided(model, layout))
    for net in (OuterResidual, InPlaceResidual, Forgetful, Biased, Shared):
        last = 5 if net is Shared else 1  # of its eight calls
        for layout in ([2, 1, last], [1, 1, 1, last]):
            model = build(net)
            assert_equal_to_whole(model, divided(model, layout))


class Choosy(Skip):
    """Calls other blocks, or has a skip connection, after the recording."""

    skips = False

    def body(self, x):
        return super().body(x) if self.skips else stacks.Stack.body(self, x)


def test_skips_may_come_after_the_recording_and_other_calls_than_recorded_are_refused():
    model = build(Choosy)
    parts = divided(model, [1, 2, 1])
    for part in (model, *(part for part, _ in parts)):
        part.skips = True
    assert_equal_to_whole(model, parts)

    model = build(Choosy)
    stage = first_stage(model).stages[0]
    for order in ((0, 2, 1, 3), (0, 1, 2), (0, 1, 2, 3, 3)):
        model.order = order
        with pytest.raises(UsageError, match="as in the recording"):
            stage.run(MicroBatch((NUMBERS,), {}))


def test_recomputed_blocks_send_once():
    class Recomputed(Skip):
        reentrant = False

        def body(self, x):
            for layer in self.blocks:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            return x

    model = build(Recomputed)
    assert_equal_to_whole(model, divided(model, 2))
    model = build(Recomputed)
    model.reentrant = True
    parts = divided(model, 2)
    with pytest.raises(UsageError, match="use_reentrant=False"):
        parts[0][1].stages[0].run(MicroBatch((NUMBERS,), {}))


def test_a_checkpoint_over_the_bound_of_two_stages_is_refused():
    class Spanning(Skip):
        def body(self, x):
            return checkpoint(super().body, x, use_reentrant=False)

    stages = [part.stages[0] for _, part in divided(build(Spanning), 2)]
    with pytest.raises(UsageError, match="with the bound of two stages between them"):
        stages[0].run(MicroBatch((NUMBERS,), {}))


def test_a_cache_from_outside_is_refused_and_after_close_values_are_missed_clearly():
    stage = first_stage(build(llama), **LABELED).stages[0]
    cache = {"past_key_values": transformers.DynamicCache(), "use_cache": True}
    with pytest.raises(UsageError, match="use_cache=False"):
        stage.run(MicroBatch((), {**LABELED, **cache}))

    model = build(sequential)
    first_stage(model).parts.gates.close()
    assert "forward" not in model[1].__dict__
    with pytest.raises(UsageError, match="another pipeline stage"):
        model(NUMBERS).sum().item()


def test_chunks_of_a_rank_leave_each_others_statistics_alone():
    class Normed(Between):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    model = build(Normed)
    parts = divided(model, 4, [[0, 2], [1, 3]])
    assert_equal_to_whole(model, parts)
    model(NUMBERS)
    (first, _), (last, _) = parts
    found = {**first.state_dict(), **last.state_dict()}
    for name in ("first.running_mean", "last.running_mean"):
        torch.testing.assert_close(found[name], model.state_dict()[name], rtol=1e-10, atol=0)
    assert "last.running_mean" not in first.state_dict()
    assert "first.running_mean" not in last.state_dict()


def test_a_frozen_stage_sends_without_history():
    model = build(llama)
    for parameter in (*model.model.embed_tokens.parameters(), *model.model.layers[0].parameters()):
        parameter.requires_grad_(False)
    stages = [part.stages[0] for _, part in divided(model, [1, 1, 2], **LABELED)]
    assert [m.requires_grad for m in stages[1].receives(MicroBatch((), LABELED))] == [False]
    sent = stages[0].run(MicroBatch((), LABELED)).sent
    assert not sent[0].requires_grad
    sent = stages[1].run(MicroBatch((), LABELED), sent).sent
    sent = [sent[0].detach().requires_grad_()]
    stages[2].run(MicroBatch((), LABELED), sent).output.loss.backward()
    assert sent[0].grad is not None
