"""Parameters under ZeRO: frozen, thawed, of odd dtypes, added too late; facts.

The conformance suite covers tied, unused, branching, mixed, transposed, tiny and empty parameters,
and those without a gradient in a step.
"""

import copy
import io
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from drivetrain.errors import UsageError
from drivetrain.testing.conformance.suite import Twins, adamw, weights
from drivetrain.testing.models import CASES, HIDDEN, OUT, WIDTH, Case, linear
from said import said
from stacks import Parts
from zero_stages import each, start, train

pytestmark = pytest.mark.ranks(2)


def quantized():
    """Return an int8 matrix with a trainable scale, a bool mask, and a complex filter."""

    def compute(m, inputs):
        weight = m.codes * m.mask * m.scale
        return m.last(torch.fft.ifft(torch.fft.fft(inputs @ weight.T) * m.filter).real)

    codes, mask = torch.randint(-9, 9, (HIDDEN, WIDTH), dtype=torch.int8), torch.rand(HIDDEN, WIDTH)
    return Parts(
        compute,
        codes=nn.Parameter(codes, requires_grad=False),
        mask=nn.Parameter(mask > 0.2, requires_grad=False),
        scale=nn.Parameter(torch.rand(HIDDEN, 1, dtype=torch.float64)),
        filter=nn.Parameter(torch.randn(HIDDEN, dtype=torch.complex128)),
        last=linear(HIDDEN, OUT),
    )


@each("sharded", "zero1", "matrices")
@pytest.mark.ranks(3)
def test_dtypes_that_do_not_train(strategy):
    """int8 and bool parameters stay what they are, beside trained complex ones."""
    accelerator = start(strategy)

    def make(model):
        return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    twins = Twins(accelerator, Case("quantized", quantized), make)
    train(twins, range(3))
    found = weights(accelerator, twins.model)
    dtypes = [found[name].dtype for name in ("codes", "mask", "filter")]
    assert dtypes == [torch.int8, torch.bool, torch.complex128]


def test_a_model_of_small_parameters_is_said_to_stay_whole():
    with said("drivetrain_zero.zero", level=logging.WARNING) as lines:
        for least in (100_000, HIDDEN * OUT):
            accelerator = start({"name": "zero3", "keep_below": least})
            model = linear(HIDDEN, OUT)
            accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    assert len(lines) == accelerator.is_main_process  # of the first one
    assert all(f"set its keep_below to {HIDDEN * OUT} or less" in text for text in lines)


@pytest.mark.complete
@each("sharded", "zero1", "fsdp", "grad")
def test_freezing_and_thawing(strategy):
    """Layers that begin to train later, and that stop: as in one process, whoever backwards."""

    def make(model):
        model[0].requires_grad_(False)
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    for by_user in (False, True):
        accelerator = start(strategy)
        twins = Twins(accelerator, CASES["mlp"], make)
        for step in range(5):
            for model in (twins.model, twins.twin):
                model[0].requires_grad_(step >= 1)
                model[2].requires_grad_(not 1 <= step < 4)
            loss = twins.loss(step)
            loss.backward() if by_user else accelerator.backward(loss)
            twins.backward_twin(step)
            twins.step()
            twins.check()


@each("sharded", "zero1")
def test_a_layer_that_is_frozen_again_before_its_step(strategy):
    """The optimizer steps it by its gradient, and decays it for as long as it has one, if zeros."""

    def make(model):
        model[0].requires_grad_(False)
        return AdamW(model.parameters(), lr=0.05, weight_decay=0.1)

    for set_to_none in (True, False):
        accelerator = start(strategy)
        twins = Twins(accelerator, CASES["mlp"], make)
        for step in range(4):
            for model in (twins.model, twins.twin):
                model[0].requires_grad_(step == 1)
            twins.backward(step)
            for model in (twins.model, twins.twin):
                model[0].requires_grad_(False)
            twins.step(set_to_none=set_to_none)
        twins.check()


@each("sharded", "zero1")
def test_parameters_that_come_after_prepare(strategy):
    """Nobody would average their gradients: the next backward says so, whoever steps."""
    for change, name in (
        (lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach().clone())), "2.weight"),
        (lambda m: m.append(linear(OUT, OUT)), "5.weight"),
        (lambda m: m[2].register_parameter("extra", nn.Parameter(torch.zeros(3))), "2.extra"),
    ):
        accelerator = start(strategy)
        twins = Twins(accelerator, CASES["mlp"], adamw)
        twins.model[2].kept = nn.Parameter(torch.zeros(3), requires_grad=False)  # needs no strategy
        twins.train_alone(0, 1)
        with accelerator.gathered(twins.model):
            change(twins.model)
        batch = twins.case.batch(0, twins.axis.rank)
        with pytest.raises(UsageError, match=f"found another one, '{name}'"):
            accelerator.backward(twins.case.loss(twins.model, batch))


@each("sharded", "zero1")
def test_facts_are_those_of_the_users_model(strategy):
    """Shape, dtype, names, counts and flags, between steps, without bringing any values.

    On rank 0 alone, too: printing, identity and what ``.data`` tells; values are refused there.
    """
    accelerator = start(strategy)
    plain = CASES["tied"].build()
    model = copy.deepcopy(plain)
    objects = list(model.parameters())
    model, _ = accelerator.prepare(model, AdamW(model.parameters()))
    sent = accelerator.traffic.total()
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    found, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(found) == list(expected)
    for name, ours in found.items():
        theirs = expected[name]
        assert (ours.shape, ours.size(), ours.ndim) == (theirs.shape, theirs.size(), theirs.ndim)
        assert (ours.numel(), len(ours), ours.dtype) == (theirs.numel(), len(theirs), theirs.dtype)
        assert (ours.requires_grad, ours.is_leaf) == (theirs.requires_grad, theirs.is_leaf)
        assert (ours.stride(), ours.device) == (theirs.stride(), theirs.device)
        assert isinstance(ours, nn.Parameter)
        assert str(tuple(ours.shape)) in repr(ours) or repr(ours) == repr(theirs)
    assert repr(model) == repr(plain)
    weight = model.body.weight
    away = type(weight) is not nn.Parameter
    assert away == ("keep_below" in strategy)
    if accelerator.is_main_process:
        assert f"{weight}" == str(weight) == repr(weight)
        assert away == ("values elsewhere, shape (13, 13), torch.float64" in f"{weight}")
        assert (weight.data.shape, weight.data.dtype) == ((HIDDEN, HIDDEN), torch.float64)
        assert {weight: 1}[list(model.parameters())[1]] == 1
        if away:
            with pytest.raises(UsageError, match="found those of 'embedding.weight' divided"):
                torch.save(model.state_dict(), io.BytesIO())
            with pytest.raises(UsageError, match="divided over the ranks between steps"):
                weight.data.zero_()
    assert accelerator.traffic.total() == sent, "a fact cost communication"


# --- parameters under ZeRO that lie in each other's memory, or nearly so ---


def shared(model):
    """The weight of the second layer is another parameter in the memory of the first one's."""
    model.two.weight = nn.Parameter(model.one.weight.data)


def crossing(model):
    """Two ranges of one tensor that have a row in common."""
    rows = torch.randn(2 * OUT - 1, WIDTH, dtype=torch.float64)
    model.one.weight, model.two.weight = nn.Parameter(rows[:OUT]), nn.Parameter(rows[OUT - 1 :])


def watching(model):
    """A buffer shows a parameter's values."""
    model.two.register_buffer("weight_of_one", model.one.weight.data[1:])


def expanded(model):
    """A trained bias has one number in memory."""
    model.two.bias = nn.Parameter(torch.ones(1, dtype=torch.float64).expand(OUT))


def halves(model):
    """Columns of one tensor in turn, and its last rows: near each other, but apart."""
    both = torch.randn(OUT + 2, 2 * WIDTH, dtype=torch.float64)
    model.one.weight = nn.Parameter(both[:OUT, ::2])
    model.two.weight = nn.Parameter(both[:OUT, 1::2])
    model.rest = nn.Parameter(both[OUT:])


def layers(change):
    """Return the sum of two layers, changed."""
    model = Parts(
        lambda m, inputs: m.one(inputs) + m.two(inputs).sin(),
        one=linear(WIDTH, OUT),
        two=linear(WIDTH, OUT),
    )
    change(model)
    return model


@each("zero1", "zero3", "sharded")
@pytest.mark.ranks(2)
def test_shared_memory_is_refused(strategy):
    """It would part without a word; frozen parameters may share theirs, and neighbors are fine."""
    for change, found in (
        (shared, "'one.weight' and 'two.weight'"),
        (crossing, "'one.weight' and 'two.weight'"),
        (watching, "'one.weight' and 'two.weight_of_one'"),
        (expanded, "'two.bias', which is expanded"),
    ):
        accelerator = start(strategy)
        model = layers(change)
        with pytest.raises(UsageError, match=found):
            accelerator.prepare(model, AdamW(model.parameters()))
        accelerator.prepare(layers(change).requires_grad_(False))
    accelerator = start(strategy)
    train(Twins(accelerator, Case("halves", partial(layers, halves)), adamw), range(2))
