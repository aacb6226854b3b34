"""Local steps against workers by hand in one process: windows, fragments, and bad options."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator, ConfigError
from drivetrain.collectives.communicator import Finished
from drivetrain.config import NestedStrategy
from drivetrain.model.modules import named_parameters
from drivetrain.saved_state import ReplicatedState
from drivetrain.shards import HeldPart
from drivetrain_local.options import LocalOptions
from drivetrain_local.outer import UNDER_WAY, Messages, OuterSteps, fragment_of_each
from local_trainings import Training, adamw, check_equal, hosts, local
from local_workers import Blocks, ByHand, Rounds, fragment_of


def sgd(model):
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.ranks(3)
def test_ranks_as_workers_with_windows_and_clipping():
    rounds = Rounds(every=2, outer_lr=0.5, outer_momentum=0.8)
    training = Training(local(rounds), make=sgd, accumulation=2)
    training.run(0, 5, micro_batches=2, clip=0.5)
    by_hand = ByHand(3, 1, rounds, sgd, clip=0.5)
    check_equal(training.outer(), by_hand.train(5, micro_batches=2))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", ["zero3", "ddp"])
def test_fragments_in_turn_beside_training(monkeypatch, inner):
    hosts(monkeypatch)
    rounds = Rounds(every=4, fragments=2, delay=3, keep=0.5)
    training = Training(local(rounds, inner, "hosts")).run(0, 9)
    by_hand = ByHand(2, 2, rounds, adamw, fragment_of)
    check_equal(training.outer(), by_hand.train(9))
    worker = by_hand.models[training.rank // 2]  # in the middle of a round: its own weights
    check_equal(training.own(), dict(worker.named_parameters()))


@pytest.mark.ranks(2)
def test_a_sparse_method_with_outer_momentum_is_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr("drivetrain_local.strategy.logger.warning", said.append)
    for method, momentum, lines in (("topk", 0.9, 1), ("topk", 0.0, 0), ("int4", 0.9, 0)):
        strategy = local(Rounds(every=2, outer_momentum=momentum))
        Training(strategy, links={"gradients": method})
        assert len(said) == lines, (method, momentum)
        said.clear()


@pytest.mark.ranks(1)
def test_refused_options():
    for options, message in (
        ({"every": 2, "fragments": 3}, "strategy.fragments: expected at most the 2 steps"),
        ({"every": 2, "delay": 2}, "strategy.delay: expected fewer steps than the 2"),
        ({"inner": {"name": "megatron", "tp": 2}}, "a multiple of tp x pp = 2 x 1"),
        ({"every": 0}, "every"),
        ({"keep": 2.0}, "keep"),
        ({"workers": "racks"}, "workers"),
    ):
        with pytest.raises(ConfigError, match=message):
            accelerator = Accelerator(strategy={"name": "local", **options}, cpu=True)
            accelerator.prepare(Blocks())


class Fakes:
    """One optimizer's parameter, and a single worker that exchanges it."""

    def __init__(self, value, late=()):
        self.parameter = parameter = nn.Parameter(torch.tensor([value], dtype=torch.bfloat16))
        held = SimpleNamespace(
            values=Tensor.detach, set_values=lambda p, values: p.detach().copy_(values)
        )
        messages = SimpleNamespace(
            optimizer=SGD([parameter], lr=1.0),
            inner=SimpleNamespace(state=held),
            workers=SimpleNamespace(size=1, rank=0),
            device=torch.device("cpu"),
            dtype=lambda p: p.dtype,
            parameters=lambda: [parameter],
            of=lambda fragment=None, also=(): [[parameter]],
            channel=lambda fragment, members: lambda flat: Finished(),
        )
        options = LocalOptions(
            every=1, outer_lr=1.0, outer_momentum=0.0, inner=NestedStrategy("ddp")
        )
        self.outer = OuterSteps(options, messages, late)

    def step(self, value):
        """Step to a value, and exchange."""
        self.outer.before_step()
        self.parameter.detach().fill_(value)
        self.outer.after_step()


def test_outer_gradients_of_bf16_weights_are_differences_in_fp32():
    fakes = Fakes(256.0)
    fakes.step(1.0078125)  # 254.9921875 from there, which bf16 rounds to 255
    assert fakes.parameter.item() == 1.0078125


@pytest.mark.parametrize("waits", [True, False])
def test_outer_weights_of_a_frozen_layer_stay_for_workers_that_come_late(waits):
    def exchange(step, state):
        step(fakes.outer._workers)
        return False

    fakes = Fakes(1.0, [] if waits else [SimpleNamespace(exchange=exchange, idle=False)])
    fakes.outer.before_step()
    fakes.parameter.requires_grad_(False)
    fakes.outer.after_step()
    assert (fakes.parameter in fakes.outer.state) is not waits


# --- fragments, their messages, outer steps and whole outer weights, without ranks ---


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
    """Return the messages of one worker by itself."""
    names = named_parameters(model)
    inner = SimpleNamespace(
        run=SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu"))),
        names=dict,
        state=ReplicatedState(model),
    )
    workers = SimpleNamespace(size=1, gradients_summed=gradients_summed)
    parts = {name: HeldPart(tuple(each.shape)) for name, each in names.items()}
    return Messages(optimizer, model, inner, workers, parts, dict.fromkeys(names, 0))


def outer_steps(**options):
    """Return a model, and its outer steps where one worker exchanges with nobody."""
    model = nn.Linear(3, 2).double()
    optimizer = SGD(model.parameters(), lr=0.1)
    alone = messages_of(
        model, optimizer, lambda flat_slice, label, replaces: lambda flat: Finished()
    )
    return model, OuterSteps(LocalOptions(**options), alone)


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

    messages = messages_of(model, SGD(model.parameters(), lr=0.1), gradients_summed)
    first = messages.channel(0, [model["one"].weight])
    assert messages.channel(0, [model["one"].weight]) is first
    assert messages.channel(0, [model["two"].weight]) is not first
    assert made == [("one.weight", None), ("two.weight", first)]
