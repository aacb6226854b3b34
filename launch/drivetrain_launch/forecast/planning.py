"""The run as rank 0 will see it, laid out without a process group, and what is refused in it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from drivetrain.config.resolve import Resolved
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.errors import ConfigError
from drivetrain.hardware.catalog import names_a_device
from drivetrain.links.chosen import LinkMethods
from drivetrain.links.islands import declared_islands
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run, find_strategy
from drivetrain.traffic import Traffic
from drivetrain_launch.ranks.placement import check_hosts

ACCELERATOR = "cuda"
"""A kind of device with memory of its own; costs depend on no more than this."""

LAYERS = 1000
LAYER_SHAPE = (1000, 1000)
EXAMPLE = "1e9 parameters in fp32 (1000 tensors of 1000 x 1000) with Adam"
"""The model in words: a dry run does not load the user's model."""


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


def example_model() -> ModelSpec:
    """Describe the model for which a strategy's cost is shown."""
    return ModelSpec(
        tuple(
            TensorSpec(f"layers.{index}.weight", LAYER_SHAPE, torch.float32, True)
            for index in range(LAYERS)
        ),
        states=2,
    )


def check_run(resolved: Resolved) -> None:
    """Check a resolved configuration against the strategy, its dtypes, the ranks and the hosts.

    The machine is not looked at: the file may be for another one. So ``nproc_per_node: auto``
    leaves the number of ranks open.

    Raises:
        ConfigError: settings that ``prepare()``, or the launcher, would refuse.
    """
    check_hosts(resolved.run.launch)
    kind, options = find_strategy(resolved.strategy, resolved.strategy_config)
    kind.check_options(options, Precision.configured(resolved.run))
    links = LinkMethods.configured(resolved.run.links, undoable=resolved.run.skips_steps)
    kind.check_links(options, links, Precision.configured(resolved.run))
    settings = resolved.run.launch
    if settings.nproc_per_node == "auto":
        return
    hardware = resolved.run.links.hardware  # a file may lie on the hosts of the run alone
    described_here = names_a_device(hardware) or Path(hardware).exists()
    for hosts in range(settings.nnodes, settings.least_nnodes - 1, -1):
        world = planned_world(settings.nproc_per_node, hosts)
        try:
            if described_here:
                world = declared_islands(world, hardware)
            Mesh.plan(kind.axes(options, world.size), world)
        except ConfigError as error:
            if hosts == settings.nnodes:
                raise
            raise ConfigError(
                f"launch.min_nnodes: the run could not go on with {hosts} hosts of "
                f"{settings.nproc_per_node} ranks: {error}"
            ) from error
