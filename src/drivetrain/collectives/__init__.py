"""Collectives over one mesh axis: ``connect`` picks the algorithm, a ``Communicator`` runs it.

======== =========================== ==========================================================
solo     one rank                    nothing to do: every handle is finished
ring     CPU tensors over gloo       our pipelined ring on point-to-point messages, run by one
                                     communication thread, so that it overlaps with compute
native   everything else             the asynchronous operations of ``torch.distributed``
======== =========================== ==========================================================

Whatever the algorithm, operations run in the order in which they were submitted, which must be the
same on every rank (see ``Header``), and the ledger gets the bytes that the ring algorithm sends.

Most operations work on one flat tensor. ``gather_parts`` and ``reduce_parts`` work on many of any
sizes and dtypes: the ring sends large ones as they lie and packs small ones into few messages, the
others copy all side by side.

``connect_over_hosts`` takes rings in levels where an axis has several ranks on each of several
hosts: less crosses the network between hosts. NCCL looks for such ways itself.
"""

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from drivetrain.collectives.communicator import Communicator as Communicator
from drivetrain.collectives.communicator import Finished as Finished
from drivetrain.collectives.communicator import Handle as Handle
from drivetrain.collectives.communicator import Parts as Parts
from drivetrain.collectives.communicator import Reduction as Reduction
from drivetrain.collectives.communicator import SoloCommunicator
from drivetrain.collectives.communicator import communicator_of as communicator_of
from drivetrain.collectives.native import NativeCommunicator
from drivetrain.collectives.ring import ConnectAxis, HierarchicalCommunicator, RingCommunicator
from drivetrain.collectives.volume import Route as Route
from drivetrain.collectives.volume import chunk_bounds as chunk_bounds
from drivetrain.collectives.volume import sent_bytes as sent_bytes
from drivetrain.collectives.volume import sent_elements as sent_elements
from drivetrain.cost import Traffic
from drivetrain.errors import UsageError
from drivetrain.runtime.mesh import Axis, Mesh
from drivetrain.runtime.world import World


def connect(
    axis: Axis,
    traffic: Traffic,
    device: torch.device,
    timeout: timedelta,
) -> Communicator:
    """Return a communicator for the tensors of one device over one mesh axis.

    Args:
        axis: the axis, with a started process group unless its size is 1.
        traffic: the ledger that operations write to.
        device: where the tensors live.
        timeout: how long one operation may take.

    Raises:
        UsageError: the axis has several ranks but was only planned, not started.
    """
    if axis.size == 1:
        return SoloCommunicator(axis, traffic, timeout)
    if axis.group is None:
        raise UsageError(
            f"the axis {axis.name!r} of {axis.size} ranks has no process group; "
            "build the mesh with Mesh.build, Mesh.plan starts nothing"
        )
    if device.type == "cpu" and "gloo" in str(dist.get_backend(axis.group)):
        return RingCommunicator(axis, traffic, timeout, axis.group)
    return NativeCommunicator(axis, traffic, timeout, axis.group)


def connect_over_hosts(mesh: Mesh, name: str, traffic: Traffic, world: World) -> Communicator:
    """Return a communicator over an axis of the mesh, in levels where the axis is over hosts.

    Collective: every rank must call it in the same order.

    Args:
        mesh: the started axes.
        name: of the axis.
        traffic: the ledger; gets what is sent between hosts under the name ``NAME.far``.
        world: the hosts of all ranks, and the device of this one.
    """
    levels = mesh.start_levels(name, world) if _ring_runs(world) else None
    connect_axis = connecting(traffic, world)
    if levels is None:
        return connect_axis(mesh[name])
    return HierarchicalCommunicator(mesh[name], levels, connect_axis, traffic, world.timeout)


def connecting(traffic: Traffic, world: World) -> ConnectAxis:
    """Return ``connect`` for the axes of one run."""
    return partial(connect, traffic=traffic, device=world.device, timeout=world.timeout)


def route_over_hosts(mesh: Mesh, name: str, world: World) -> Route:
    """Return the route of data under ``connect_over_hosts``, to count the bytes of a rank."""
    return Route(mesh[name], mesh.levels(name, world) if _ring_runs(world) else None)


def _ring_runs(world: World) -> bool:
    """Whether ranks of these devices exchange data by our rings."""
    return world.device.type == "cpu" and (not world.backend or "gloo" in world.backend)
