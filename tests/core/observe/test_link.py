"""The load of the link between hosts, from records of steps that are made here."""

import pytest

from drivetrain.cost import Traffic
from drivetrain.observe.figures import StepFigures
from drivetrain.observe.recorder import LinkLoad
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run

LINK = 1e8
"""Bytes per second."""


def run_of(axis, hosts):
    """Return a run over one axis on hosts, which are named by letters, and its mesh."""
    world = World(size=len(hosts), local_size=hosts.count("a"), hosts=tuple(hosts))
    mesh = Mesh.plan({axis: len(hosts)}, world)
    return Run(world=world, mesh=mesh, precision=Precision(), accumulation=1, traffic=Traffic())


@pytest.fixture
def run():
    """A run of two ranks on each of two hosts; its collectives go in two levels."""
    made = run_of("dp", "aabb")
    made.mesh.neighbors("dp", 2)
    made.mesh.across("dp", 2)
    return made


def test_bytes_are_those_of_a_host_and_not_of_its_inner_links(run):
    sent = {
        ("dp", "all_gather"): 1000,  # one ring over four ranks: one of two sends to the other host
        ("dp.far", "all_reduce"): 300,  # each of the two ranks sends
        ("dp.near", "all_reduce"): 5000,
        ("tp of another strategy", "all_reduce"): 7,
    }
    assert run.bytes_between_hosts(sent) == 1000 + 600


def test_a_stage_inside_of_a_host_stands_for_the_last_one_of_the_host():
    """Stages 0 and 1 are on one host: stage 0 sends to stage 1 what stage 1 sends to stage 2."""
    for hosts, link in (("aabb", "pp.near"), ("ab", "pp.far")):
        run = run_of("pp", hosts)
        run.mesh.name_links("pp")
        assert run.bytes_between_hosts({(link, "send"): 1000}) == 1000
    assert run.mesh.line("pp.far").spans_hosts


def told(run, *, seconds, waiting, megabytes, steps=6):
    lines = []
    load = LinkLoad(run, LINK, lines.append)
    for step in range(1, steps + 1):
        first = 100 if step <= 2 else 1  # steps that warm up do not count
        load.take(
            StepFigures(
                step=step,
                seconds=seconds * first,
                waiting={"dp": waiting},
                sent={"dp/all_reduce": round(megabytes * 1e6)},
            )
        )
    return lines


def test_who_is_warned_once_with_bytes_and_seconds(run):
    (line,) = told(run, seconds=1.2, waiting=0.8, megabytes=92)
    assert "a step sends 92.0 MB from each host, 0.92 s at the measured 100 MB/s, and works" in line
    assert "works for 0.4 s; accumulate more micro-batches" in line
    assert told(run, seconds=1.2, waiting=0.8, megabytes=92, steps=4) == []

    for seconds, waiting, megabytes, warned in (
        (1.0, 0.01, 92, False),  # hidden under the work
        (1.0, 0.6, 30, False),  # waits for something else
        (1.0, 0.0, 92, True),  # a device waits: the time of the link is taken for it
        (2.0, 0.0, 92, False),
    ):
        lines = told(run, seconds=seconds, waiting=waiting, megabytes=megabytes)
        assert bool(lines) == warned
