"""Fragments, their messages, and outer steps, without ranks."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.optim import SGD

from drivetrain.collectives.communicator import Finished
from drivetrain.model.modules import named_parameters
from drivetrain.saved_state import ReplicatedState
from drivetrain.shards import HeldPart
from drivetrain_local.options import LocalOptions
from drivetrain_local.outer import UNDER_WAY, Messages, OuterSteps, fragment_of_each
from local_workers import Blocks, fragment_of


def test_blocks_take_turns_and_workers_keep_a_share():
    model = Blocks(5)
    for count in (2, 3):
        found = fragment_of_each(model, named_parameters(model), count)
        assert found == {name: fragment_of(name, count) for name in found}

    model, outer = outer_steps(every=1, keep=0.25, outer_lr=0.5, outer_momentum=0.8)
    start = model.weight.detach().clone()
    outer.before_step()
    model.weight.data += 1.0
    outer.after_step()
    stepped = start + 0.5 * (1 + 0.8)
    torch.testing.assert_close(model.weight.detach(), 0.25 * (start + 1.0) + 0.75 * stepped)


def messages_of(model, optimizer, gradients_summed):
    """Return the messages of one worker by itself, and the strategy inside of it."""
    names = named_parameters(model)
    inner = SimpleNamespace(
        run=SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu"))),
        names=dict,
        state=ReplicatedState(model),
    )
    workers = SimpleNamespace(size=1, gradients_summed=gradients_summed)
    parts = {name: HeldPart(tuple(each.shape)) for name, each in names.items()}
    return (
        Messages(optimizer, model, inner, workers, parts, dict.fromkeys(names, 0)),
        inner,
        workers,
    )


def outer_steps(**options):
    """Return a model, and its outer steps where one worker exchanges with nobody."""
    model = nn.Linear(3, 2).double()
    optimizer = SGD(model.parameters(), lr=0.1)
    alone = messages_of(
        model, optimizer, lambda flat_slice, label, replaces: lambda flat: Finished()
    )
    messages, inner, workers = alone
    return model, OuterSteps(optimizer, LocalOptions(**options), inner, workers, messages)


def test_a_longer_warm_up_comes_too_late_for_workers_that_have_parted():
    for apart in (True, False):
        _, outer = outer_steps(every=4, warmup_steps=9)
        outer.taken_over(apart=apart)
        outer.resume(5)
        assert outer.warms_up is not apart


def test_an_exchange_is_saved_while_it_is_under_way_and_not_later():
    model, outer = outer_steps(every=2, delay=1)
    for under_way in (False, True, False):
        outer.before_step()
        model.weight.data += 1.0
        outer.after_step()
        outer.shown()
        assert (UNDER_WAY in outer.optimizer.state[model.weight]) is under_way
        outer.hidden()


def test_a_message_of_other_tensors_has_another_channel_though_it_is_as_large():
    model, made = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)}), []

    def gradients_summed(flat_slice, label, replaces):
        made.append((flat_slice.spans[0].name, replaces))
        return object()

    messages, *_ = messages_of(model, SGD(model.parameters(), lr=0.1), gradients_summed)
    first = messages.channel(0, [model["one"].weight])
    assert messages.channel(0, [model["one"].weight]) is first
    assert messages.channel(0, [model["two"].weight]) is not first
    assert made == [("one.weight", None), ("two.weight", first)]
