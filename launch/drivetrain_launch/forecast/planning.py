"""The run as rank 0 will see it, laid out without a process group."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from drivetrain.config.resolve import Resolved
from drivetrain.links.chosen import LinkMethods
from drivetrain.links.islands import declared_islands
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run, find_strategy
from drivetrain.traffic import Traffic

ACCELERATOR = "cuda"
"""A kind of device with memory of its own; costs depend on no more than this."""


def plan(resolved: Resolved, ranks: int, *, on_accelerators: bool = False) -> Run:
    """Return the run as rank 0 would see it, with so many ranks on each host."""
    settings = resolved.run.launch
    world = planned_world(ranks, settings.nnodes)
    return plan_on(resolved, world.hosts, on_accelerators=on_accelerators)


def plan_on(resolved: Resolved, hosts: Sequence[str], *, on_accelerators: bool = False) -> Run:
    """Return the run as rank 0 would see it, with the host of each rank; hosts may be unequal."""
    world = World(size=len(hosts), local_size=hosts.count(hosts[0]), hosts=tuple(hosts))
    world = declared_islands(world, resolved.run.links.hardware)
    if on_accelerators:
        world = replace(world, device=torch.device(ACCELERATOR))
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    axes = kind.axes(options, world.size)
    return Run(
        world=world,
        mesh=Mesh.plan(axes, world),
        precision=Precision.configured(resolved.run),
        accumulation=resolved.run.accumulation,
        traffic=Traffic(),
        links=LinkMethods.configured(resolved.run.links, undoable=resolved.run.skips_steps),
    )


def planned_world(ranks: int, nodes: int) -> World:
    """Return the world of a run as rank 0 will see it, with as many ranks on each host."""
    hosts = tuple(f"host {host}" for host in range(nodes) for _ in range(ranks))
    return World(size=len(hosts), local_size=ranks, hosts=hosts)
