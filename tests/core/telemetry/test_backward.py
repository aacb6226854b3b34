"""The measured seconds of a backward, from records that are made here, and from a training."""

import os
import time
from dataclasses import replace

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.links.chosen import LinkMethods
from drivetrain.reporting import run_report
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run
from drivetrain.telemetry.backward import BackwardTime
from drivetrain.telemetry.figures import StepFigures
from drivetrain.traffic import Traffic

SLEEP_S = 0.2
FAR = {"far": "auto", "allow": "rounding", "mbit_per_s": 1000.0}


def run_of(gradients: str = "auto", backward_s: float = 0.0, hosts: str = "ab") -> Run:
    far = FarConfig(gradients=gradients)
    links = LinkMethods.configured(LinksConfig(far=far, backward_s=backward_s))
    world = World(size=2, local_size=1, hosts=tuple(hosts))
    mesh = Mesh.plan({"dp": 2}, world)
    return Run(
        world=world,
        mesh=mesh,
        precision=Precision(),
        accumulation=2,
        traffic=Traffic(),
        links=links,
    )


def test_the_figure_is_wanted_where_a_choice_is_open_without_it():
    assert BackwardTime.wanted(run_of())
    assert not BackwardTime.wanted(run_of(gradients="bf16"))
    assert not BackwardTime.wanted(run_of(backward_s=0.1))
    assert not BackwardTime.wanted(run_of(hosts="aa"))
    there = replace(run_of().world, device=torch.device("cuda"))
    assert not BackwardTime.wanted(replace(run_of(), world=there))


def test_the_line_has_the_mean_of_a_micro_batch_after_the_warm_up_and_comes_once():
    lines: list[str] = []
    measured = BackwardTime(run_of(), lines.append)
    for step in range(1, 8):
        seconds = 30.0 if step <= 2 else 0.8
        sections = {"forward": 5.0, "backward": seconds}
        measured.take(StepFigures(step=step, sections=sections, waiting={"dp": 7.0}))
        assert len(lines) == (step >= 5)
    assert "a backward takes 0.4 s on rank 0 without waiting, the mean of 3 steps" in lines[0]
    assert "links.backward_s=0.4 lets" in lines[0]


class Slow(torch.autograd.Function):
    """A backward that takes a while."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SLEEP_S)
        return gradient


@pytest.mark.ranks(2, timeout=60)
def test_a_training_tells_the_time_of_its_backward_on_rank_0(monkeypatch):
    rank = int(os.environ["RANK"])
    monkeypatch.setenv("GROUP_RANK", str(rank))
    said: list[str] = []
    monkeypatch.setattr(run_report.logger, "announce", said.append)
    accelerator = Accelerator(config={"strategy": "ddp", "links": FAR}, cpu=True)
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(6):
        optimizer.zero_grad()
        if rank == 1:
            time.sleep(2 * SLEEP_S)  # rank 0 waits so long in its backward
        accelerator.backward(Slow.apply(model(torch.ones(2, 8))).sum())
        optimizer.step()
    accelerator.free_memory()
    accelerator.end_training()
    lines = [line for line in said if "a backward takes" in line]
    assert len(lines) == (rank == 0)
    for line in lines:
        seconds = float(line.split("links.backward_s=")[1].split()[0])
        assert SLEEP_S <= seconds < 2 * SLEEP_S, line
