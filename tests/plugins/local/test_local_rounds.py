"""Local steps against workers by hand in one process: windows, fragments, and bad options."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator, ConfigError
from drivetrain.collectives.communicator import Finished
from drivetrain.config import NestedStrategy
from drivetrain_local.options import LocalOptions
from drivetrain_local.outer import OuterSteps
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
            device=torch.device("cpu"),
            dtype=lambda p: p.dtype,
            parameters=lambda: [parameter],
            of=lambda fragment=None, also=(): [[parameter]],
            channel=lambda fragment, members: lambda flat: Finished(),
        )
        self.outer = OuterSteps(
            SGD([parameter], lr=1.0),
            LocalOptions(every=1, outer_lr=1.0, outer_momentum=0.0, inner=NestedStrategy("ddp")),
            SimpleNamespace(state=held),
            SimpleNamespace(size=1, rank=0),
            messages,
            late,
        )

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
