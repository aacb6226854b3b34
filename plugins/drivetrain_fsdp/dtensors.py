"""The shards as torch's ``DTensor``s, at the border: for torch's checkpoints and other tools.

Inside of drivetrain shards are plain tensors, so optimizers pay nothing for the description.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.parallel.layout import ParameterSlot
from drivetrain.parallel.placement import Placement, Ranks
from drivetrain.parallel.unit import FlatParameter


def as_dtensors(placement: Placement, ranks: Ranks, device: torch.device) -> dict[str, DTensor]:
    """Return every parameter's shard as a DTensor that shares its memory. Collective.

    A parameter is sharded along the dim outermost in memory among the dims of more than one index,
    as ``torch.chunk`` would cut the parameter. A 0-d parameter is replicated: only the first rank's
    writes count.

    Args:
        placement: the parameters.
        ranks: the ranks of the model.
        device: of the shards.

    Returns:
        By name, in the dtype that the optimizer updates; global shapes and strides.

    Raises:
        UsageError: the axis has one rank, so there is no process group to describe; or there are
            secondary shards, which what is written into DTensors would not reach.
    """
    if ranks.secondary is not None:
        raise UsageError(
            "expected secondary: none with DTensors, found host: values that a tool writes into "
            "them would not reach the secondary shards; leave the option out, or take "
            "accelerator.get_state_dict(model) and accelerator.save_model"
        )
    mesh = _device_mesh(ranks, device.type)
    replicated = [Replicate()] * (mesh.ndim - 1)
    found = {}
    for slot in placement:
        flat = placement.flat_of(slot)
        local = _piece(slot, flat) if slot.owned_numel else _nothing(slot, flat, ranks.sharing)
        along = Shard(slot.outer_dim) if slot.shape else Replicate()
        if not slot.shape:
            local = _everywhere(local, slot, flat, ranks.sharing)
        found[slot.name] = DTensor.from_local(
            local.detach(),
            mesh,
            [*replicated, along],
            run_check=False,
            shape=torch.Size(slot.shape),
            stride=slot.strides,
        )
    return found


def _piece(slot: ParameterSlot, flat: FlatParameter) -> Tensor:
    """Return this rank's rows in memory."""
    tensor = flat.shard.tensor
    if tensor is None or flat.masters_left:
        raise UsageError(
            f"expected the rows of {slot.name!r} in memory, found that a store keeps them; take "
            "model.state_dict(), or leave offload.params out and take offload.optimizer: cpu"
        )
    return slot.piece(tensor)


def _device_mesh(ranks: Ranks, device_type: str) -> DeviceMesh:
    sharing = ranks.sharing.axis
    if sharing.group is None:
        raise UsageError(
            f"expected several ranks that divide the model for DTensors, found {sharing.size}, "
            "which has whole tensors: take model.state_dict()"
        )
    if ranks.replicas is None:
        return DeviceMesh.from_group(sharing.group, device_type, mesh_dim_names=("shard",))
    replicas = ranks.replicas.axis
    return DeviceMesh.from_group(
        [replicas.group, sharing.group],  # type: ignore[list-item]  # both were started
        device_type,
        mesh=torch.tensor(ranks.everyone.axis.ranks).view(replicas.size, sharing.size),
        mesh_dim_names=("replicate", "shard"),
    )


def _nothing(slot: ParameterSlot, flat: FlatParameter, sharing: Communicator) -> Tensor:
    """Return the rows of a rank that owns no element: none, unless rows have no elements."""
    rows = 0
    if slot.shape and not slot.numel:
        total = slot.shape[slot.outer_dim]
        each = -(-total // sharing.size)
        rows = max(min(each, total - sharing.rank * each), 0)
    shape = [rows if dim == slot.outer_dim else size for dim, size in enumerate(slot.shape)]
    return flat.values.new_empty(shape, dtype=slot.master)


def _everywhere(
    local: Tensor, slot: ParameterSlot, flat: FlatParameter, sharing: Communicator
) -> Tensor:
    """Return a 0-d parameter's value on all ranks: on its owner, the parameter's own memory."""
    value = local.reshape(()) if slot.owned_numel else _nothing(slot, flat, sharing).new_zeros(())
    sharing.broadcast(value, 0, label=f"the value of {slot.name}").wait()
    return value
