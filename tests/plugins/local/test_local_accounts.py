"""The promise of bytes of local steps: a round's messages, memory, and methods for slow links."""

from dataclasses import asdict, replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator
from drivetrain.config import NestedStrategy
from drivetrain.cost import ModelSpec
from drivetrain.planner.layout import far_method
from drivetrain.runtime.mesh import Axis
from drivetrain.runtime.world import World
from drivetrain.simulator.step import SimulatedRun, SimulatedUnit, axis_places
from drivetrain.testing.conformance.suite import AccountChecks
from drivetrain_local.options import LocalOptions
from drivetrain_local.strategy import Local, _agreement
from drivetrain_megatron.config import MegatronConfig
from local_trainings import hosts
from local_workers import Rounds

WIDTH = 64


class TestEveryStep(AccountChecks):
    """Rounds of one step: each step sends all."""

    strategy: ClassVar[dict[str, object]] = {
        "name": "local",
        "workers": "ranks",
        "every": 1,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
    }
    worlds = (2,)


def model():
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)]
    return nn.Sequential(*layers)


class Run:
    """Steps of the model under ``local``, with the bytes of each round."""

    def __init__(self, rounds, inner="ddp", workers="ranks", late_s=0.0, model=model, **far):
        strategy = {"name": "local", "inner": inner, "workers": workers, **asdict(rounds)}
        strategy["late_s"] = late_s
        config = {"strategy": strategy, "links": {"far": far}}
        self.accelerator = Accelerator(config=config, cpu=True)
        self.every, self.delay = rounds.every, rounds.delay
        self.make, each = model, model()
        vectors = [p for p in each.parameters() if p.ndim == 1]
        matrices = [p for p in each.parameters() if p.ndim > 1]
        groups = [{"params": vectors}, {"params": matrices}]  # in another order than the model's
        self.model, self.optimizer = self.accelerator.prepare(each, SGD(groups, lr=0.1))

    def steps(self, count):
        generator = torch.Generator().manual_seed(self.accelerator.process_index)
        for _ in range(count):
            inputs = torch.randn(8, WIDTH, generator=generator)
            self.accelerator.backward(self.model(inputs).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def wait(self):
        """Wait for exchanges under way, whose bytes count when they are sent."""
        if self.delay:
            self.accelerator.get_state_dict(self.model)

    def check_bytes(self):
        self.steps(2 * self.every)
        self.wait()
        self.accelerator.traffic.clear()
        self.steps(self.every)
        self.wait()
        strategy = self.accelerator.strategy_of(self.model)
        spec = ModelSpec.of(self.make(), states=0)
        promised = type(strategy).cost(strategy.config, spec, strategy.run).sent
        if self.accelerator.is_main_process:
            sent = self.accelerator.traffic.sent().items()
            assert {key: -(-count // self.every) for key, count in sent if count} == promised
        return promised


@pytest.mark.ranks(2)
def test_bytes_of_a_round():
    streaming = Rounds(every=4, fragments=2, delay=1, keep=0.5)
    warmed = Rounds(every=3, warmup_steps=3)  # the cost is that of the steps after the warm-up
    runs = ((Rounds(every=3), 0), (streaming, 0), (Rounds(every=3), 30), (warmed, 0))
    for rounds, late_s in runs:
        run = Run(rounds, late_s=late_s)
        run.check_bytes()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late_s", [0, 30])
def test_bytes_between_hosts(monkeypatch, late_s):
    hosts(monkeypatch)
    run = Run(Rounds(every=3), workers="hosts", late_s=late_s)
    promised = run.check_bytes()
    told = {"dp.near"} if late_s and run.accelerator.process_index % 2 == 0 else set()
    assert {axis for axis, _ in promised} == {"dp", "dp.far"} | told


def test_ranks_and_workers_agree_and_cross_links():
    near, far = (
        Axis(name=name, size=size, rank=0, ranks=tuple(range(size)), hosts=("a",) * size)
        for name, size in (("dp.near", 2), ("dp.far", 3))
    )
    sent = [_agreement(LocalOptions(fragments=n, late_s=1.0), near, far) for n in (1, 4)]
    assert sum(sent[0].values()) == 8 * (1 + 3)
    assert sent[1] == {key: 4 * count for key, count in sent[0].items()}

    world = World(size=2, local_size=2, hosts=("a", "a"))
    assert Local.planning().crosses_links(LocalOptions(workers="ranks"), world)
    assert not Local.planning().crosses_links(LocalOptions(), world)


def test_steps_on_paper():
    units = [SimulatedUnit("layer", (), (), ((1000, False),))]
    for precision, inner, share in (("no", "ddp", 1), ("fp16", "ddp", 1), ("bf16", "zero2", 2)):
        run = SimulatedRun({"dp": 4}, micro_batches=1, precision=precision, per_host=2)
        options = LocalOptions(every=10, inner=NestedStrategy(inner))
        step = Local.planning().simulate(options, units, run)
        # 2 (K-1)/K of the rank's part of 4 bytes each, a tenth per step
        assert step.sent()[0]["dp.far", "all_reduce"] == 4 * 1000 / share / 10
        assert step.held[0]["outer"] == 2 * 4 * 1000 / share
        # Where the exchange starts, outer gradients are there one by one, and side by side.
        assert step.tasks[-1].during == 2 * 4 * 1000 / share
        assert step.tasks[-1].lane == "compute", "the step waits"
        streaming = replace(options, fragments=5, delay=3, keep=0.5)
        step = Local.planning().simulate(streaming, units, run)
        assert step.held[0]["outer"] == pytest.approx((2 + 2 / 5) * 4 * 1000 / share)
        assert step.tasks[-1].during == 2 * 4 * 1000 / share / 5
        assert step.tasks[-1].lane == "dp.far"

    # Each stage exchanges its own parts: half of the divided layer, all of the other one.
    units = [SimulatedUnit("block", (), (), ((1000, True), (100, False)), repeated=True)] * 2
    for tp, pp, worker, parts in ((2, 1, 1, 2 * 600), (2, 1, 2, 2 * 600), (1, 2, 1, 1100)):
        inner = NestedStrategy("megatron", MegatronConfig(tp=tp, pp=pp))
        options = LocalOptions(every=10, inner=inner)
        axes, per_host = Local.axes(options, 2 * tp * pp * worker), tp * pp * worker
        assert list(axes.items())[-1] == ("dp", 2 * worker)
        run = SimulatedRun(axes, micro_batches=1, precision="no", per_host=per_host)
        step = Local.planning().simulate(options, units, run)
        assert [sent["dp.far", "all_reduce"] for sent in step.sent()] == [4 * parts / 10] * pp
        assert [held["outer"] for held in step.held] == [2 * 4 * parts] * pp
        place = axis_places(step.axes, per_host)["dp.far"]
        assert (place.ranks, place.together) == (2, 1), "the exchange crosses the link"


SIDE = 4096


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["exact", "int8", "powersgd"])
def test_a_step_on_paper_agrees_with_the_cost(monkeypatch, method):
    monkeypatch.setenv("GROUP_RANK", str(torch.distributed.get_rank()))
    run = Run(Rounds(every=4, fragments=2, delay=3), workers="hosts", gradients=method)
    strategy = run.accelerator.strategy_of(run.model)
    layer = nn.Linear(SIDE, SIDE, bias=False, device="meta")
    cost = Local.cost(strategy.config, ModelSpec.of(layer, states=2), strategy.run)
    paper = SimulatedRun({"dp": 2}, 1, precision="no", per_host=1, far=far_method(method, 2))
    step = Local.planning().simulate(
        strategy.config, [SimulatedUnit("layer", (), (), ((SIDE**2, False),))], paper
    )
    promised = sum(count for (axis, _), count in cost.sent.items() if axis == "dp.far")
    drawn = sum(count for (axis, _), count in step.sent()[0].items() if axis == "dp.far")
    held = step.held[0]["outer"] + step.held[0].get("errors of links", 0)
    assert drawn == pytest.approx(promised, rel=1e-3)
    assert held == pytest.approx(cost.held["outer"], rel=1e-3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("inner", "method"), [("ddp", "int8"), ("fsdp", "topk")])
def test_methods_for_slow_links(method, inner):
    rounds = Rounds(every=3)
    exact, rounded = Run(rounds, inner), Run(rounds, inner, gradients=method)
    exact.steps(3)
    rounded.steps(3)
    start = model().state_dict()
    found, expected = (r.accelerator.get_state_dict(r.model) for r in (rounded, exact))
    apart = (found["0.weight"] - expected["0.weight"]).norm()
    moved = (expected["0.weight"] - start["0.weight"]).norm()
    assert 0 < apart < {"int8": 0.02, "topk": 1.0}[method] * moved
    assert torch.equal(found["2.bias"], expected["2.bias"]), "small vectors are exact"
    rounded.check_bytes()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["int4", "powersgd"])
@pytest.mark.parametrize("inner", ["zero2", "fsdp"])
def test_pieces_of_matrices_are_encoded(monkeypatch, inner, method):
    """Two ranks of a worker have half of each matrix; the cost says how much a half takes."""
    hosts(monkeypatch)
    run = Run(Rounds(every=3), inner, workers="hosts", gradients=method)
    run.check_bytes()
