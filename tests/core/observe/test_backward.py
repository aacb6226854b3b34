"""The first steps tell the seconds of a backward, from events that are made here."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from drivetrain.compression.automatic import COUNTED, WARM_UP, Sender, choose_links
from drivetrain.compression.methods import LinkMethods
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.cost import ModelSpec, Traffic
from drivetrain.facade.prepared import RunState
from drivetrain.observe import recorder as link
from drivetrain.observe.recorder import LinkChoice
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run, find_strategy

MATRIX = 1024
EXACT_S = 33.6
"""Seconds of the exact gradients of the matrix between two hosts at 1 Mbit/s."""


WORLD = World(size=2, local_size=1, hosts=("a", "b"))
LINKS = LinksConfig(far=FarConfig(gradients="auto"), allow="rounding", mbit_per_s=1.0)


def chosen(model, links=LINKS, world=WORLD, strategy="ddp", **options):
    """Return a strategy's class and configuration, and the methods that are chosen for it."""
    kind, config = find_strategy(strategy, find_strategy(strategy)[0].Config(**options))
    sender = Sender(kind, config, Precision.of("no"))
    tensors = ModelSpec.of(model).parameters
    return kind, config, choose_links(LinkMethods.configured(links), sender, tensors, world)[0]


class Events:
    """A model under ddp on two hosts whose events are made by hand, and a clock.

    Attributes:
        strategy: takes methods, and does nothing else.
        said: the lines of the choice.
        other: seconds of the other rank's backward.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.traffic, self.now = GradientState(1), Traffic(), 0.0
        self.said: list[str] = []
        monkeypatch.setattr(link.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(link.logger, "announce", self.said.append)
        self.other = 0.0
        monkeypatch.setattr(link, "gather_facts", lambda mine, *_, **__: [mine, self.other])
        self.model = torch.nn.Linear(MATRIX, MATRIX, bias=False)
        kind, config, links = chosen(self.model)
        self.strategy = object.__new__(kind)
        self.strategy.config, self.strategy.ranks = config, SimpleNamespace(take_links=bool)
        self.strategy.run = run = Run(
            world=WORLD,
            mesh=Mesh.plan({"dp": 2}, WORLD),
            precision=Precision(),
            accumulation=1,
            traffic=self.traffic,
            links=links,
        )
        entry = SimpleNamespace(
            strategy=self.strategy, model=self.model, given=ModelSpec.of(self.model)
        )
        self.prepared = SimpleNamespace(models=[entry], window=self.state, run=run, last_run=None)
        self.prepared.running = partial(RunState.running, self.prepared)
        self.choice = LinkChoice(self.prepared)
        self.choice.before_prepare(self.model)
        self.choice.after_prepare(entry)

    @property
    def name(self) -> str:
        return self.strategy.run.links.name_for("gradients")

    def backward(self, seconds: float, waited: float = 0.0) -> None:
        self.choice.before_backward()
        self.traffic.waited("dp", waited)
        self.now += seconds + waited
        self.choice.after_backward(torch.zeros(()), None)

    def steps(self, *seconds: float, waited: float = 0.0) -> None:
        for each in seconds:
            self.backward(each, waited)
            self.choice.after_step()


@pytest.fixture
def events(monkeypatch) -> Events:
    return Events(monkeypatch)


def test_the_choice_comes_once_after_the_steps_that_count(events, monkeypatch):
    events.steps(*[1.0] * (WARM_UP + COUNTED - 1))
    assert events.name == "auto"
    assert not events.said
    events.steps(1.0)
    assert events.name == "bf16"
    events.steps(*[2 * EXACT_S] * 6)
    assert events.name == "bf16"
    (line,) = events.said
    assert line.endswith("beside 1 s of compute, as 3 steps tell")
    slow = Events(monkeypatch)
    slow.other = 2 * EXACT_S
    slow.steps(*[1.0] * (WARM_UP + COUNTED))
    assert slow.name == "exact", "the slowest rank's backward counts"


@pytest.mark.parametrize(
    ("warm_up", "counted", "name"),
    [
        (1.0, (2 * EXACT_S, 1.0, 2 * EXACT_S), "exact"),
        (2 * EXACT_S, (1.0, 2 * EXACT_S, 1.0), "bf16"),
    ],
)
def test_the_usual_backward_after_the_warm_up_counts(events, warm_up, counted, name):
    events.steps(warm_up, warm_up, *counted)
    assert events.name == name


def test_of_a_window_the_last_backward_counts_without_waiting_for_other_ranks(events):
    for _ in range(WARM_UP + COUNTED):
        events.backward(2 * EXACT_S)
        events.steps(1.0, waited=2 * EXACT_S)
    assert events.name == "bf16"


def test_a_loss_of_several_models_times_each_that_ran(events):
    last = SimpleNamespace(strategy=None, model=None, given=None)
    events.prepared.models.append(last)
    for forward in (False, True):
        for _ in range(WARM_UP + COUNTED):
            if forward:
                events.choice.before_forward(events.prepared.models[0])
            events.prepared.last_run = last
            events.steps(1.0)
        assert events.name == ("bf16" if forward else "auto")


def test_steps_without_a_backward_or_with_uneven_inputs_do_not_count(events):
    events.steps(*[1.0] * (WARM_UP + COUNTED - 1))
    events.choice.after_step()
    events.state.uneven = True
    events.steps(1.0)
    assert events.name == "auto"
    events.state.uneven = False
    events.choice.after_step()
    assert events.name == "auto"
    events.steps(1.0)
    assert events.name == "bf16"


def test_a_choice_of_a_checkpoint_stays(events):
    events.steps(1.0)
    links = events.strategy.run.links
    events.strategy.take_links(links.decided({}))
    events.steps(*[1.0] * (WARM_UP + COUNTED))
    assert events.name == "exact"
    assert not events.said


def test_only_processors_and_undeclared_seconds_wait_for_the_first_steps():
    model = torch.nn.Linear(MATRIX, MATRIX)
    for options, awaited in (
        ({}, ("gradients",)),
        ({"links": replace(LINKS, backward_s=0.1)}, ()),
        ({"world": replace(WORLD, hosts=("a", "a"))}, ()),
        ({"links": replace(LINKS, allow="theory"), "exchange": "momentum"}, ()),
        ({"strategy": "local"}, ()),
        ({"links": replace(LINKS, allow="exact")}, ()),
    ):
        assert chosen(model, **options)[2].awaited == awaited, options
