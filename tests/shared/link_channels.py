"""A model's flat gradients on made-up hosts, for tests of channels between hosts."""

import dataclasses
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.collectives.volume import FlatSlice, ParameterRow
from drivetrain.compression.communicator import LinkedCommunicator, connect_linked
from drivetrain.compression.methods import LinkMethods
from drivetrain.config.schema import FarConfig, LinksConfig
from drivetrain.cost import Traffic
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.world import World

WEIGHT, BIAS, TABLE = (70, 50), (33,), (64, 41)
ROWS = [
    ParameterRow("weight", WEIGHT, 0, 0),
    ParameterRow("bias", BIAS, 0, 3500),
    ParameterRow("table", TABLE, 0, 3533),
]
NUMEL = 3533 + 64 * 41 + 3  # and three elements of no parameter
WHOLE = FlatSlice.of(NUMEL, torch.float32, ROWS)


def world_of(hosts: str) -> World:
    """Return this process's world with made-up hosts, one letter per rank."""
    found = World.discover(cpu=True)
    return dataclasses.replace(found, hosts=tuple(hosts), timeout=timedelta(seconds=30))


def links_of(
    gradients: str, parameters: str = "exact", *, undoable: bool = False, **options: object
) -> LinkMethods:
    far = FarConfig(gradients=gradients, parameters=parameters, **options)
    return LinkMethods.configured(LinksConfig(far=far), undoable=undoable)


def connected(hosts: str, links: LinkMethods, traffic: Traffic | None = None) -> LinkedCommunicator:
    world = world_of(hosts)
    mesh = Mesh.build({"dp": world.size}, world)
    made = connect_linked(mesh, "dp", traffic or Traffic(), world, links)
    assert isinstance(made, LinkedCommunicator)
    return made


def flat_slices_of(communicator: LinkedCommunicator) -> list[list[FlatSlice]]:
    """Return what each rank has of the flat tensor."""
    return [[WHOLE.cut(*each)] for each in communicator.chunk(NUMEL)]


def parts_of(communicator: LinkedCommunicator, flat: Tensor) -> list[list[Tensor]]:
    return [[flat[start:stop]] for start, stop in communicator.chunk(NUMEL)]


def gradients(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(NUMEL, generator=generator)


def total(step: int, size: int) -> Tensor:
    return sum((gradients(step, rank).double() for rank in range(size)), torch.zeros(1)).float()


def gathered(tensor: Tensor) -> list[Tensor]:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return everyone


def state_of(communicator: LinkedCommunicator) -> list[Tensor]:
    """Return copies of the errors and factors of all channels on this rank."""
    sums = [channel.reduction for channel in communicator.channels]
    errors = [kept.errors.clone() for each in sums for kept in each.feedback()]
    return errors + [factor.clone() for each in sums for _, factor in each.factors()]


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether tensors are the same bit by bit."""
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def kept_back(communicator: LinkedCommunicator) -> Tensor:
    """Return the sum over ranks of all errors, in the places of the flat tensor."""
    starts = {row.name: row.start for row in ROWS}
    found = torch.zeros(NUMEL)
    for channel in communicator.channels:
        for span, errors, _ in channel.reduction.feedback():
            start = starts[span.name] + span.first
            found[start : start + errors.numel()] += errors
    return torch.stack(gathered(found)).sum(0)
