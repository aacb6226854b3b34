"""Makes divided parameters whole for a while: for reading, surgery and export."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.parts.replicate import replicate
from drivetrain_megatron.tensor.operators import gathered
from drivetrain_megatron.tensor.partition import Partition


@contextmanager
def joined(
    ranks: Communicator, partitions: Mapping[nn.Parameter, Partition | None], *, modify: bool
) -> Iterator[None]:
    """Context in which parameters have their global shape and values on every rank. Collective.

    Args:
        ranks: the axis ``tp``.
        partitions: how each parameter is cut; None where every rank has the whole.
        modify: whether changes inside are kept: those of the axis's first rank, for all of them.
    """
    if ranks.size == 1:
        yield
        return
    cut = {p: (p.data, partition) for p, partition in partitions.items() if partition is not None}
    for parameter, (share, partition) in cut.items():
        parameter.data = gathered(share, ranks, partition)
    try:
        yield
        if modify:
            replicate(partitions, ranks, "changed parameters")
            for parameter, (share, partition) in cut.items():
                share.copy_(partition.take(parameter.data, ranks.rank))
    finally:
        for parameter, (share, _) in cut.items():
            parameter.data = share


@contextmanager
def refusing_forwards(model: nn.Module) -> Iterator[None]:
    """Context in which a model must not be called: its layers compute with shares of parameters.

    Raises:
        UsageError: in a forward inside.
    """

    def refuse(module: nn.Module, args: Any) -> None:
        raise UsageError(
            f"expected {type(model).__name__} not to be called while its parameters are gathered, "
            "found a forward: its layers compute with this rank's share of them; leave gathered() "
            "first, and use accelerator.inference(model) for evaluation and generation"
        )

    handle = model.register_forward_pre_hook(refuse, prepend=True)
    try:
        yield
    finally:
        handle.remove()
