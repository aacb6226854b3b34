"""The choice of methods for slow links after the first steps: alike on all ranks, and for good."""

import json
import time

import pytest
import torch
from torch import nn

from drivetrain.collectives.facts import gather_facts
from drivetrain.compression.automatic import COUNTED, WARM_UP
from drivetrain.facade import checkpoints
from drivetrain.observe import recorder as link
from linked_trainings import WIDTH, Training, model_of, same, spread

pytestmark = pytest.mark.ranks(2)

EXACT_STEPS = WARM_UP + COUNTED
SLOWEST, SLOW, FAST = 0.01, 4.0, 1e9
"""Mbit/s of links: exact gradients take 27 s, which no backward here hides; 0.07 s; no time."""
HIDES_S = 0.15
"""Seconds of a backward that hides exact gradients on the slow link."""

ERROR = 0.02
"""The largest difference after two steps by bf16, in units of the largest change in these."""

BY_UPDATES = {"zero1", "zero2", "megatron zero2"}
"""Forms that send updates, which no compute hides: their method is chosen at prepare()."""
WITH_VALUES = {"zero3 divided", "zero3", "fsdp"}
"""Forms that send values of parameters, each time that these are used."""
ALL = ("ddp", "ddp in buckets", "fsdp hybrid", *sorted(BY_UPDATES), *sorted(WITH_VALUES))


class Late(torch.autograd.Function):
    """A backward that takes a while."""

    @staticmethod
    def forward(ctx, inputs, seconds):
        ctx.seconds = seconds
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


def two_matrices():
    return model_of()[:4]


def one_matrix():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))


class Choosing(Training):
    """Methods are left to drivetrain unless they are named; a backward may take a while."""

    sleep_s = 0.0

    def __init__(self, form, **options):
        usual = {"make": two_matrices, "far": "auto", "allow": "rounding", "mbit_per_s": SLOWEST}
        super().__init__(form, **{**usual, **options})

    def loss(self, inputs):
        return Late.apply(self.model(inputs), self.sleep_s).square().mean()


def check_alike(lines):
    every = gather_facts(lines, list[str], doing="the lines of all ranks")
    assert all(each == lines for each in every)


def check_slow_link(form, said, make=two_matrices):
    """Check a training whose traffic no compute hides, before the choice and after it."""
    updates = {"gradients": "exact", "parameters": "bf16" if form in BY_UPDATES else "exact"}
    named = Choosing(form, make=make, far=updates).train(EXACT_STEPS)
    exact = named.state()
    further = named.train(2).state()
    named.end()
    said.clear()
    training = Choosing(form, make=make)
    awaited = ("gradients", "parameters") if form in WITH_VALUES else ("gradients",)
    assert training.links.awaited == awaited
    training.train(1)
    training.check_sent()
    training.train(EXACT_STEPS - 3)
    assert same(training.state(), exact), f"{form}: the first steps are not exact"
    values = "bf16" if form in BY_UPDATES | WITH_VALUES else "exact"
    assert training.links.names == ("bf16", values), form
    assert training.links.auto is None
    training.check_sent()
    assert len([line for line in said if ", as 3 steps tell" in line]) == len(awaited)
    check_alike(said)
    approximate = training.state()
    training.end()
    assert not same(approximate, further), f"{form}: the methods are not in use"
    for name, value in further.items():
        error = (value - approximate[name]).abs().max()
        assert error < ERROR * (value - exact[name]).abs().max(), f"{form}: {name}"


def listen(monkeypatch):
    """Return the list of what this rank says about choices from now on."""
    lines = []
    monkeypatch.setattr(link.logger, "announce", lines.append)
    monkeypatch.setattr(checkpoints.logger, "announce", lines.append)
    return lines


def test_on_a_link_that_nothing_hides_every_strategy_takes_the_least_time(monkeypatch):
    spread(monkeypatch)
    said = listen(monkeypatch)
    for form in ALL:
        check_slow_link(form, said)
    check_slow_link("zero3", said, one_matrix)  # which stays whole, and goes on by updates


def test_ranks_with_other_times_agree_and_traffic_that_hides_stays_exact(monkeypatch):
    rank = spread(monkeypatch)
    said = listen(monkeypatch)
    for form in ("ddp", "fsdp"):
        said.clear()
        # All wait for rank 1: traffic hides behind its backward, also where rank 0 has none.
        training = Choosing(form, allow="theory", mbit_per_s=SLOW)
        training.sleep_s = 2 * HIDES_S * rank
        training.train(EXACT_STEPS)
        assert training.links.names == ("exact", "exact")
        assert training.links.auto is None
        training.sleep_s = 0.0
        training.check_sent()
        check_alike(said)
        assert all("exact (exact); of exact" in line for line in said)
        training.end()


@pytest.mark.exhaustive
def test_a_resumed_run_goes_on_with_the_choice_bit_for_bit(monkeypatch, tmp_path):
    spread(monkeypatch)
    said = listen(monkeypatch)
    # Updates begin anew after a load, whatever their method.
    far = {"gradients": "auto"}
    for form, links in (
        ("ddp", {"allow": "theory"}),
        ("zero2", {"allow": "theory", "far": far}),
        ("zero3 divided", {"allow": "theory"}),
    ):
        training = Choosing(form, **links)
        early, late = tmp_path / f"{form} early", tmp_path / f"{form} late"
        training.train(2).accelerator.save_state(early)
        training.train(EXACT_STEPS).accelerator.save_state(late)
        names, step = training.links.names, training.step
        assert names[0] in ("topk", "powersgd")
        expected = training.train(3).state()
        training.end()
        said.clear()
        # On a link as fast as this, the first steps would choose exact traffic.
        resumed = Choosing(form, **{**links, "mbit_per_s": FAST})
        resumed.accelerator.load_state(late)
        assert resumed.links.names == names
        assert [line for line in said if f"gradients {names[0]}, as in the checkpoint" in line]
        resumed.step = step
        assert same(resumed.train(3).state(), expected), form
        assert resumed.links.names == names
        resumed.check_sent()
        resumed.end()
        resumed = Choosing(form, **links)
        resumed.accelerator.load_state(early)
        assert resumed.links.is_open("gradients"), "the checkpoint is from before the choice"
        resumed.end()


def test_a_method_of_a_checkpoint_that_is_permitted_no_more_is_not_taken(monkeypatch, tmp_path):
    spread(monkeypatch)
    said = listen(monkeypatch)
    training = Choosing("ddp", allow="theory").train(EXACT_STEPS)
    name = training.links.name_for("gradients")
    training.accelerator.save_state(tmp_path / "theory")
    training.end()
    resumed = Choosing("ddp")
    resumed.accelerator.load_state(tmp_path / "theory")
    expected = f"rounding at most: gradients not {name} as in the checkpoint, which is no candidate"
    assert any(expected in line for line in said)
    assert resumed.train(EXACT_STEPS).links.names == ("bf16", "exact")
    resumed.end()


def test_gradients_may_be_chosen_after_parameters(monkeypatch):
    spread(monkeypatch)
    found = []
    for apart in (False, True):
        training = Choosing("zero3 divided").train(EXACT_STEPS - 1)
        strategy = training.strategy
        if apart:
            strategy.take_links(training.links.decided({}, ["parameters"]))
            assert training.links.names == ("auto", "exact")
        assert training.train(2).links.name_for("gradients") == "bf16"
        (communicator,) = {id(each): each for each in strategy.ranks.summing}.values()
        names = [span.name for channel in communicator.channels for span in channel.spans]
        found.append(sorted(names))
        training.end()
    assert found[0] == found[1] != []


def test_the_report_has_the_promise_of_the_chosen_methods(monkeypatch, tmp_path):
    rank = spread(monkeypatch)
    training = Choosing("ddp", project_dir=tmp_path).train(EXACT_STEPS + 2)
    strategy = training.strategy
    promised = type(strategy).cost(strategy.config, training.spec, strategy.run).sent
    training.accelerator.end_training()
    if rank == 0:
        (path,) = tmp_path.glob("run/*/run.json")
        (model,) = json.loads(path.read_text())["models"]
        assert model["sent"] == {"/".join(key): count for key, count in promised.items()}
        assert "dp.far/all_to_all" in model["sent"]
