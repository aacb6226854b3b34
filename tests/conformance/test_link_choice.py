"""The choice of methods for slow links after the first steps: alike on all ranks, and for good."""

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.collectives.facts import gather_facts
from drivetrain.cost import ModelSpec
from drivetrain.facade import loading
from drivetrain.links.automatic import COUNTED, WARM_UP
from drivetrain.links.chosen import LinkMethods
from drivetrain.telemetry import backward

WIDTH, ROWS = 64, 8
EXACT_STEPS = WARM_UP + COUNTED
SLOWEST, SLOW, FAST = 0.01, 1.0, 1e9
"""Mbit/s of links: exact gradients take 27 s, which no backward here hides; 0.27 s; no time."""
HIDES_S = 0.5
"""Seconds of a backward that hides exact gradients on the slow link."""

ERROR = 0.02
"""The largest difference after two steps by bf16, in units of the largest change in these."""

STRATEGIES: Mapping[str, Mapping[str, object]] = {
    "ddp": {"name": "ddp"},
    "ddp in buckets": {"name": "ddp", "bucket_mib": 0.02, "first_bucket_mib": 0.02},
    "zero1": {"name": "zero1"},
    "zero2": {"name": "zero2"},
    "zero3": {"name": "zero3", "keep_below": 0},
    "zero3, small ones whole": {"name": "zero3"},
    "fsdp": {"name": "fsdp"},
    "hybrid": {"name": "fsdp", "sharding": "hybrid"},
    "megatron": {"name": "megatron", "data_parallel": "zero2"},
}
BY_UPDATES = {"zero1", "zero2", "megatron"}
"""Forms that send updates, which no compute hides: their method is chosen at prepare()."""
WITH_VALUES = {"zero3", "zero3, small ones whole", "fsdp"}
"""Forms that send values of parameters, each time that these are used."""


def model_of() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def one_matrix() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))


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


class Training:
    """A model under a strategy, whose methods are left to drivetrain unless they are named."""

    def __init__(
        self,
        form: str,
        sleep_s: float = 0.0,
        far: object = "auto",
        project_dir: Path | None = None,
        **links: object,
    ) -> None:
        links = {"far": far, "allow": "rounding", "mbit_per_s": SLOWEST, **links}
        config = {"strategy": STRATEGIES[form], "links": links}
        self.accelerator = Accelerator(config=config, cpu=True, project_dir=project_dir)
        self.sleep_s = sleep_s
        torch.manual_seed(3)
        model = model_of()
        self.spec = ModelSpec.of(model, states=1)
        optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.step = 0

    @property
    def links(self) -> LinkMethods:
        return self.accelerator.strategy_of(self.model).run.links

    def train(self, steps: int) -> "Training":
        for _ in range(steps):
            generator = torch.Generator().manual_seed(
                100 * self.step + self.accelerator.process_index
            )
            inputs = torch.randn(ROWS, WIDTH, generator=generator)
            self.optimizer.zero_grad()
            late = Late.apply(self.model(inputs), self.sleep_s)
            self.accelerator.backward(late.square().mean())
            self.optimizer.step()
            self.step += 1
        return self

    def state(self) -> dict[str, Tensor]:
        found = self.accelerator.get_state_dict(self.model)
        return {name: value.clone() for name, value in found.items()}

    def check_sent(self) -> None:
        """Compare the bytes of two steps with the promise of the strategy as it is now."""
        strategy = self.accelerator.strategy_of(self.model)
        promised = type(strategy).cost(strategy.config, self.spec, strategy.run).sent
        before = Counter(self.accelerator.traffic.sent())
        self.train(2)
        sent = Counter(self.accelerator.traffic.sent())
        sent.subtract(before)
        twice = {key: 2 * count for key, count in promised.items()}
        assert {key: count for key, count in sent.items() if count} == twice

    def end(self) -> None:
        self.accelerator.free_memory()


def hosts(monkeypatch: pytest.MonkeyPatch, per_host: int = 1) -> int:
    """Let ranks believe in hosts of so many ranks; return the rank."""
    rank = int(os.environ["RANK"])
    monkeypatch.setenv("GROUP_RANK", str(rank // per_host))
    return rank


def check_alike(lines: list[str]) -> None:
    every = gather_facts(lines, list[str], doing="the lines of all ranks")
    assert all(each == lines for each in every)


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def check_slow_link(form: str, said: list[str]) -> None:
    """Check a training whose traffic no compute hides, before the choice and after it."""
    updates = {"gradients": "exact", "parameters": "bf16" if form in BY_UPDATES else "exact"}
    named = Training(form, far=updates).train(EXACT_STEPS)
    exact = named.state()
    named.end()
    said.clear()
    training = Training(form)
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
    further = Training(form, far=updates).train(EXACT_STEPS + 2)
    assert not same(approximate, further.state()), f"{form}: the methods are not in use"
    for name, value in further.state().items():
        error = (value - approximate[name]).abs().max()
        assert error < ERROR * (value - exact[name]).abs().max(), f"{form}: {name}"
    further.end()


@pytest.mark.ranks(2)
def test_on_a_link_that_nothing_hides_every_strategy_takes_the_least_time(monkeypatch):
    hosts(monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(backward.logger, "announce", said.append)
    for form in STRATEGIES:
        check_slow_link(form, said)


@pytest.mark.ranks(2)
def test_a_matrix_that_stays_whole_goes_on_by_updates_after_the_choice(monkeypatch):
    hosts(monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(backward.logger, "announce", said.append)
    monkeypatch.setitem(globals(), "model_of", one_matrix)
    check_slow_link("zero3, small ones whole", said)


@pytest.mark.ranks(4, timeout=600)
def test_hosts_of_two_ranks_choose_after_the_first_steps_too(monkeypatch):
    hosts(monkeypatch, 2)
    said: list[str] = []
    monkeypatch.setattr(backward.logger, "announce", said.append)
    for form in ("ddp in buckets", "zero3", "hybrid"):
        check_slow_link(form, said)


@pytest.mark.ranks(2)
def test_ranks_with_other_times_agree_and_traffic_that_hides_stays_exact(monkeypatch):
    rank = hosts(monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(backward.logger, "announce", said.append)
    for form in ("ddp", "fsdp"):
        said.clear()
        # All wait for rank 1: traffic hides behind its backward, also where rank 0 has none.
        training = Training(form, 2 * HIDES_S * rank, allow="theory", mbit_per_s=SLOW).train(
            EXACT_STEPS
        )
        assert training.links.names == ("exact", "exact")
        assert training.links.auto is None
        training.sleep_s = 0.0
        training.check_sent()
        check_alike(said)
        assert all("exact (exact); of exact" in line for line in said)
        training.end()


@pytest.mark.ranks(2)
def test_declared_seconds_choose_at_prepare(monkeypatch):
    hosts(monkeypatch)
    for seconds, name in ((HIDES_S, "exact"), (1e-9, "bf16")):
        training = Training("ddp", backward_s=seconds, mbit_per_s=SLOW)
        assert training.links.names == (name, "exact")
        assert training.links.awaited == ()
        training.train(1)
        training.check_sent()
        training.end()


@pytest.mark.ranks(2)
def test_a_resumed_run_goes_on_with_the_choice_bit_for_bit(monkeypatch, tmp_path):
    hosts(monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(loading.logger, "announce", said.append)
    # Updates begin anew after a load, whatever their method.
    far = {"gradients": "auto"}
    for form, links in (
        ("ddp", {"allow": "theory"}),
        ("zero2", {"allow": "theory", "far": far}),
        ("zero3", {"allow": "theory"}),
    ):
        training = Training(form, **links)
        early, late = tmp_path / f"{form} early", tmp_path / f"{form} late"
        training.train(2).accelerator.save_state(early)
        training.train(EXACT_STEPS).accelerator.save_state(late)
        names, step = training.links.names, training.step
        assert names[0] in ("topk", "powersgd")
        expected = training.train(3).state()
        training.end()
        said.clear()
        # On a link as fast as this, the first steps would choose exact traffic.
        resumed = Training(form, **{**links, "mbit_per_s": FAST})
        resumed.accelerator.load_state(late)
        assert resumed.links.names == names
        assert [line for line in said if f"gradients {names[0]}, as in the checkpoint" in line]
        resumed.step = step
        assert same(resumed.train(3).state(), expected), form
        assert resumed.links.names == names
        resumed.check_sent()
        resumed.end()
        resumed = Training(form, **links)
        resumed.accelerator.load_state(early)
        assert resumed.links.is_open("gradients"), "the checkpoint is from before the choice"
        resumed.end()


@pytest.mark.ranks(2)
def test_a_method_of_a_checkpoint_that_is_permitted_no_more_is_not_taken(monkeypatch, tmp_path):
    hosts(monkeypatch)
    said: list[str] = []
    monkeypatch.setattr(loading.logger, "announce", said.append)
    training = Training("ddp", allow="theory").train(EXACT_STEPS)
    name = training.links.name_for("gradients")
    training.accelerator.save_state(tmp_path / "theory")
    training.end()
    resumed = Training("ddp")
    resumed.accelerator.load_state(tmp_path / "theory")
    expected = f"rounding at most: gradients not {name} as in the checkpoint, which is no candidate"
    assert any(expected in line for line in said)
    assert resumed.train(EXACT_STEPS).links.names == ("bf16", "exact")
    resumed.end()


@pytest.mark.ranks(2)
def test_gradients_may_be_chosen_after_parameters(monkeypatch):
    hosts(monkeypatch)
    found = []
    for apart in (False, True):
        training = Training("zero3").train(EXACT_STEPS - 1)
        strategy = training.accelerator.strategy_of(training.model)
        if apart:
            strategy.take_links(training.links.decided({}, ["parameters"]))
            assert training.links.names == ("auto", "exact")
        assert training.train(2).links.name_for("gradients") == "bf16"
        (communicator,) = {id(each): each for each in strategy.summing}.values()
        names = [span.name for channel in communicator.channels for span in channel.spans]
        found.append(sorted(names))
        training.end()
    assert found[0] == found[1] != []


@pytest.mark.ranks(2)
def test_the_report_has_the_promise_of_the_chosen_methods(monkeypatch, tmp_path):
    rank = hosts(monkeypatch)
    training = Training("ddp", project_dir=tmp_path).train(EXACT_STEPS + 2)
    strategy = training.accelerator.strategy_of(training.model)
    promised = type(strategy).cost(strategy.config, training.spec, strategy.run).sent
    training.accelerator.end_training()
    if rank == 0:
        (path,) = tmp_path.glob("run/*/run.json")
        (model,) = json.loads(path.read_text())["models"]
        assert model["sent"] == {"/".join(key): count for key, count in promised.items()}
        assert "dp.far/all_to_all" in model["sent"]


@pytest.mark.ranks(2)
def test_steps_that_ranks_take_alone_do_not_count(monkeypatch):
    rank = hosts(monkeypatch)
    training = Training("ddp").train(EXACT_STEPS - 1)
    with training.accelerator.join_uneven_inputs([training.model]):
        training.train(1 + 2 * rank)
    assert training.links.is_open("gradients")
    assert training.train(1).links.name_for("gradients") == "bf16"
    training.end()
